"""`pekoe doctor [SITE]`: is a cluster fit for runs, and what to do where it is not.

In: a site or a configuration. Out: findings, each with its next step. `cluster_trial` starts a real world of two nodes
for some seconds, whose ranks run `rank_probe`; each `*_check` says what is measured or asked, and what that means.
Nothing waits for long: each question has a limit.
"""
