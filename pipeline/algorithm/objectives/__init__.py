"""Token losses of the policy, one function a file: PolicyTerms in, TokenLoss out. Named in the registry."""
