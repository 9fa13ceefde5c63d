"""The allocation grammar: forms of the design, AReaL's strings, positions of errors, and its invariances."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pekoe.launch.allocation import AllocationError, check_engines, check_has_rollout, parse, place, place_attached
from pekoe.launch.placement import Dimensions, Part, Placement
from pekoe.pipeline.config.run import RunConfig


def test_split_puts_the_trainer_first_whatever_the_order_of_the_text() -> None:
    for text in ("vllm:d2t2+fsdp:d4", "fsdp:d4+vllm:t2d2", " vllm : d2t2 + fsdp:d4 "):
        placement = parse(text)
        assert placement.trainer_ranks == (0, 1, 2, 3)
        assert placement.rollout_ranks == (4, 5, 6, 7)
        assert placement.world_size == 8
        assert not placement.colocated
        assert placement.actor == Part("fsdp", "actor", Dimensions(data=4), None, (0, 1, 2, 3))
        assert placement.rollout == Part("vllm", "rollout", Dimensions(data=2, tensor=2), None, (4, 5, 6, 7))
        assert placement.roles_of(0) == ("trainer",)
        assert placement.roles_of(7) == ("rollout",)


def test_colocated_ranks_have_both_roles() -> None:
    placement = parse("vllm:d4|fsdp:d4")
    assert placement.colocated
    assert placement.world_size == 4
    assert placement.rollout_ranks == placement.trainer_ranks == (0, 1, 2, 3)
    assert placement.roles_of(3) == ("trainer", "rollout")
    with pytest.raises(ValueError, match="rank 4 is outside the world of 4 ranks"):
        placement.roles_of(4)


def test_hybrid_halves_use_the_same_ranks() -> None:
    placement = parse("megatron:(attn:d2p2t2c8|ffn:d2p2e16)")
    assert placement.world_size == 64
    assert placement.rollout is None
    assert placement.rollout_ranks == ()
    assert not placement.colocated
    assert placement.actor.dimensions == Dimensions(data=2, pipeline=2, tensor=2, context=8)
    assert placement.actor.feed_forward == Dimensions(data=2, pipeline=2, expert=16)


def test_named_parts_have_their_own_ranks_or_the_actors() -> None:
    own = parse("vllm:d2+fsdp[critic]:d3+fsdp:d4")
    assert [(part.role, part.ranks) for part in own.parts] == [
        ("actor", (0, 1, 2, 3)),
        ("critic", (4, 5, 6)),
        ("rollout", (7, 8)),
    ]
    assert own.trainer_ranks == tuple(range(7))
    shared = parse("fsdp[critic]:d4|fsdp:d4+hf:d1")
    assert [(part.role, part.ranks) for part in shared.parts] == [
        ("actor", (0, 1, 2, 3)),
        ("critic", (0, 1, 2, 3)),
        ("rollout", (4,)),
    ]
    assert not shared.colocated


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("sglang:d4p1t1+fsdp:d4p1t1", "fsdp:d4+sglang:d4"),
        ("sglang[rollout]:d1p1t8|megatron[actor]:d1p1t8", "megatron:d1t8|sglang:d1t8"),
        ("vllm:d2t4+megatron:d2p2t4e2", "megatron:d2t4p2e2+vllm:d2t4"),
    ],
)
def test_areal_strings_parse(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 0, "expected an engine, found the end"),
        ("fsdp", 4, "expected ':' after 'fsdp'"),
        ("fsdp:", 5, "expected dimensions"),
        ("fsdp:x4", 5, "'x' is no dimension"),
        ("fsdp:d", 6, "'d' has no number"),
        ("fsdp:d0", 5, "d0 is too small"),
        ("fsdp:t2d2t1", 9, "'t' is given twice"),
        ("fsdp:d99999999999", 6, "too large"),
        ("fsdp:d999999999", 0, "the world is too large"),
        ("tgi:d4+fsdp:d4", 0, "expected an engine, found 'tgi'"),
        ("sglang:d4+d4", 10, "dimensions without an engine"),
        ("vllm:d4", 7, "no part trains the actor"),
        ("fsdp[critic]:d4", 15, "no part trains the actor"),
        ("fsdp:d1+megatron:d1", 8, "a second actor part"),
        ("hf:d1+fsdp:d1+vllm:d1", 14, "a second rollout part"),
        ("fsdp[judge]:d1", 5, "'judge' is no name for 'fsdp'"),
        ("hf[actor]:d1+fsdp:d1", 3, "'actor' is no name for 'hf'"),
        ("fsdp[critic:d1", 11, "expected ']'"),
        ("vllm:d2|fsdp:d4", 8, "fsdp:d4 has 4 ranks, vllm:d2 has 2"),
        ("vllm:d2|fsdp[critic]:d2+fsdp:d4", 0, "rollout shares ranks with critic"),
        ("vllm:d2+fsdp:d2+", 16, "expected an engine, found the end"),
        ("fsdp:d2)", 7, "')' does not belong here"),
        ("fsdp:d4e3", 5, "e3 does not fit"),
        ("megatron:(attn:d2|ffn:d4)", 18, "attn has 2 ranks (d x t x p x c), ffn has 4"),
        ("megatron:(attn:d2p2|ffn:d4)", 20, "attn has p2, ffn has p1"),
        ("megatron:(attn:d2e2|ffn:d4)", 17, "'e' (expert) does not belong in this half"),
        ("megatron:(attn:d2|ffn:d1c2)", 24, "'c' (context) does not belong in this half"),
        ("megatron:(ffn:d2|attn:d2)", 10, "expected 'attn'"),
        ("vllm:(attn:d2|ffn:d2)+fsdp:d2", 0, "'vllm' cannot be a hybrid"),
    ],
)
def test_wrong_strings_fail_with_position_and_rule(text: str, position: int, words: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert caught.value.position == position
    assert caught.value.rule
    lines = str(caught.value).split("\n")
    assert lines[1] == f"  {text}"
    assert lines[2].index("^") == 2 + position
    assert lines[3].startswith("  rule: ")


def configured(allocation: str = "", actor: str = "", rollout: str = "") -> RunConfig:
    config = RunConfig(allocation=allocation)
    config.actor.backend = actor
    config.rollout.backend = rollout
    return config


def test_backends_compose_when_allocation_is_absent() -> None:
    assert place(configured(actor="fsdp:d4", rollout="hf:d2")) == parse("hf:d2+fsdp:d4")
    assert place(configured(actor="fsdp:d4")) == parse("fsdp:d4")
    with pytest.raises(AllocationError, match="nothing says which ranks do what"):
        place(configured())
    with pytest.raises(AllocationError, match="nothing says which ranks do what"):
        place(configured(rollout="hf:d2"))


def test_backends_must_agree_with_allocation() -> None:
    agreed = configured("hf:d2|fsdp:d2", "fsdp:d2", "hf:d2t1")
    assert place(agreed) == parse("hf:d2|fsdp:d2")
    with pytest.raises(AllocationError, match=r"actor\.backend: disagrees with allocation .* which has fsdp:d2"):
        place(configured("hf:d2|fsdp:d2", "fsdp:d1"))
    with pytest.raises(AllocationError, match=r"rollout\.backend: disagrees .* no rollout part"):
        place(configured("fsdp:d2", rollout="hf:d1"))


@pytest.mark.parametrize(
    ("actor", "rollout", "words"),
    [
        ("fsdp", "hf:d1", "actor.backend: expected ':'"),
        ("hf:d1", "hf:d1", "actor.backend: 'hf' is the wrong kind of engine"),
        ("fsdp:d1", "fsdp:d1", "rollout.backend: 'fsdp' is the wrong kind of engine"),
        ("fsdp:d1+hf:d1", "", "actor.backend: '+' does not belong here"),
        ("fsdp[critic]:d1", "", "actor.backend: 'critic' does not belong here"),
    ],
)
def test_a_backend_is_one_part_of_the_right_kind(actor: str, rollout: str, words: str) -> None:
    with pytest.raises(AllocationError) as caught:
        place(configured(actor=actor, rollout=rollout))
    assert words in str(caught.value)


def test_engines_of_today_take_their_own_dimensions() -> None:
    for text in (
        "hf:d1+fsdp:d1",
        "hf:d2|fsdp:d2",
        "fsdp:d4",
        "hf:d2t1+fsdp:d4p1",
        "vllm:d2t2+fsdp:d4",
        "vllm:d1|fsdp:d1",
    ):
        check_engines(parse(text))
    check_engines(place_attached(configured("vllm:d2t2")))
    for text, words in (
        ("hf:d1t2+fsdp:d1", r"engine 'hf' cannot do tensor parallelism \(t2\)"),
        ("vllm:d1p2+fsdp:d1", r"engine 'vllm' cannot do pipeline parallelism \(p2\)"),
        ("vllm:d1t2|fsdp:d2", r"engine 'vllm' cannot do tensor parallelism \(t2\) on the trainer's ranks"),
        ("sglang:d1t2+fsdp:d2", "engine 'sglang' is not available in this version"),
        ("hf:d1+fsdp:d2c2", r"engine 'fsdp' cannot do context parallelism \(c2\)"),
        ("hf:d1+fsdp:(attn:d2|ffn:d1e2)", "engine 'fsdp' cannot do a hybrid"),
        ("hf:d1+fsdp:d1+fsdp[critic]:d1", "a separate critic is not available in this version"),
        ("hf:d1+native:d1", "engine 'native' is not available in this version"),
    ):
        with pytest.raises(AllocationError, match=words) as caught:
            check_engines(parse(text))
        assert caught.value.rule


def test_instances_are_neighbours_and_the_first_of_each_leads() -> None:
    placement = parse("vllm:d2t2+fsdp:d3")
    assert placement.rollout is not None
    assert placement.rollout.instances == ((3, 4), (5, 6))
    assert placement.rollout_leaders == (3, 5)
    attached = place_attached(configured("vllm:d2t4"))
    assert attached.rollout_leaders == (0, 4)
    assert attached.world_size == 8
    assert not attached.rollout_shares_ranks


def test_a_run_with_rollout_asks_for_the_part() -> None:
    check_has_rollout(parse("hf:d1+fsdp:d1"))
    with pytest.raises(AllocationError, match="needs a rollout part"):
        check_has_rollout(parse("fsdp:d1"))


degree = st.integers(1, 3)


@st.composite
def part_texts(draw: st.DrawFn, head: str, size: int | None = None) -> tuple[str, int]:
    """A part with shuffled dimensions, and its size."""
    if size is None:
        degrees = {letter: draw(degree) for letter in draw(st.permutations("dtpc"))}
        size = degrees["d"] * degrees["t"] * degrees["p"] * degrees["c"]
    else:
        degrees = {"d": size}
    return head + ":" + "".join(f"{letter}{value}" for letter, value in degrees.items()), size


@st.composite
def allocation_texts(draw: st.DrawFn) -> str:
    trainer = draw(st.sampled_from(("fsdp", "megatron", "deepspeed", "native")))
    actor, size = draw(part_texts(trainer))
    groups = [[actor]]
    for name in draw(st.lists(st.sampled_from(("critic", "ref", "reward", "teacher")), unique=True)):
        if draw(st.booleans()):
            groups[0].append(draw(part_texts(f"{trainer}[{name}]", size))[0])
        else:
            groups.append([draw(part_texts(f"{trainer}[{name}]"))[0]])
    rollout = draw(st.sampled_from(("hf", "vllm", "sglang")))
    where = draw(st.sampled_from(("own", "shared", "none")))
    if where == "own":
        groups.append([draw(part_texts(rollout))[0]])
    elif where == "shared":
        groups[0].append(draw(part_texts(rollout, size))[0])
    shuffled = draw(st.permutations([draw(st.permutations(group)) for group in groups]))
    return "+".join("|".join(group) for group in shuffled)


@settings(max_examples=200, deadline=None)
@given(allocation_texts())
def test_text_round_trips_and_ranks_cover_the_world(text: str) -> None:
    placement = parse(text)
    assert parse(str(placement)) == placement
    assert str(parse(str(placement))) == str(placement)
    _check_cover(placement)


def _check_cover(placement: Placement) -> None:
    assert placement.actor.ranks[0] == 0
    assert {rank for part in placement.parts for rank in part.ranks} == set(range(placement.world_size))
    for part in placement.parts:
        assert part.ranks == tuple(range(part.ranks[0], part.ranks[0] + part.size))
        for other in placement.parts:
            assert part.ranks == other.ranks or not set(part.ranks) & set(other.ranks)
    assert placement.trainer_ranks == tuple(range(len(placement.trainer_ranks)))
    if placement.rollout is not None and not placement.colocated:
        assert not set(placement.rollout_ranks) & set(placement.trainer_ranks)
    for rank in range(placement.world_size):
        assert placement.roles_of(rank)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="hfvlmsdpcte[]()|+:0123456789 actorn", max_size=40))
def test_any_text_parses_or_fails_within_the_text(text: str) -> None:
    try:
        placement, position = parse(text), 0
    except AllocationError as error:
        placement, position = None, error.position
    assert 0 <= position <= len(text)
    if placement is not None:
        _check_cover(placement)
