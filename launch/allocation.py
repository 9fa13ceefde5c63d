"""The allocation grammar: one line of text says which engine runs on how many ranks, and which ranks those are.

    allocation := group { "+" group }            "+" = ranks of their own
    group      := part { "|" part }              "|" = the same ranks; sizes must agree
    part       := engine [ "[" name "]" ] ":" ( dimensions | hybrid )
    hybrid     := "(" "attn:" dimensions "|" "ffn:" dimensions ")"
    dimensions := letter number { letter number }, each of d t p c e at most once

`vllm:d2t2+fsdp:d4` is split, `vllm:d4|fsdp:d4` is colocated, `fsdp[critic]:d4` names a part. Whatever the order of the
text, the actor's ranks come first, then other trainer parts, then rollout: world rank 0 is the head.
Critic, reference and reward models live on the actor's ranks unless they are named.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pekoe.launch.placement import LETTERS, Dimensions, Part, Placement
from pekoe.pipeline.registry import INFERENCE_ENGINES, TRAIN_ENGINES

if TYPE_CHECKING:
    from pekoe.pipeline.config.run import RunConfig

__all__ = [
    "AllocationError",
    "Dimensions",
    "Part",
    "Placement",
    "check_engines",
    "check_has_rollout",
    "parse",
    "place",
    "place_attached",
]

ROLLOUT_ENGINES = ("hf", "vllm", "sglang")
TRAINERS = ("fsdp", "megatron", "deepspeed", "native")
TRAINER_NAMES = ("actor", "critic", "ref", "reward", "teacher")
MAX_WORLD_SIZE = 1 << 20

ENGINE_DIMENSIONS = {"hf": "d", "vllm": "dt", "fsdp": "d"}
"""Letters that an engine of this version can use above 1."""

PART_RULE = "a part is engine[name]:dimensions, e.g. fsdp:d4, vllm:d2t2, fsdp[critic]:d4"
DIMENSION_RULE = "dimensions are letters d (data), t (tensor), p (pipeline), c (context), e (expert) with a number >= 1"


class AllocationError(ValueError):
    """A wrong allocation: `position` (0-based, in `text`) is where, `rule` is what is allowed."""

    def __init__(self, problem: str, text: str, position: int, rule: str, key: str = "allocation") -> None:
        self.problem = problem
        self.text = text
        self.position = position
        self.rule = rule
        shown = text.replace("\t", " ").replace("\n", " ")
        super().__init__(f"{key}: {problem}\n  {shown}\n  {' ' * position}^ position {position + 1}\n  rule: {rule}")


class _Reader:
    """A cursor over the text that knows how to complain."""

    def __init__(self, text: str, key: str) -> None:
        self.text = text
        self.key = key
        self.position = 0

    def error(self, problem: str, rule: str, position: int | None = None) -> AllocationError:
        where = self.position if position is None else position
        return AllocationError(problem, self.text, where, rule, self.key)

    def skip_spaces(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def peek(self) -> str:
        """The next character that is no space, or "" at the end."""
        self.skip_spaces()
        return self.text[self.position : self.position + 1]

    def accept(self, token: str) -> bool:
        self.skip_spaces()
        if not self.text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def expect(self, token: str, after: str, rule: str) -> None:
        if not self.accept(token):
            found = repr(self.peek()) if self.peek() else "the end"
            raise self.error(f"expected {token!r} after {after}, found {found}", rule)

    def word(self) -> str:
        """A run of lower-case letters, possibly empty."""
        self.skip_spaces()
        match = re.compile("[a-z]*").match(self.text, self.position)
        assert match
        self.position = match.end()
        return match.group()


def parse(text: str, key: str = "allocation") -> Placement:
    """Reads an allocation; raises AllocationError naming the position and the rule. `key` is named in errors."""
    reader = _Reader(text, key)
    groups: list[list[tuple[Part, int]]] = [[]]
    while True:
        reader.skip_spaces()
        start = reader.position
        groups[-1].append((_part(reader), start))
        if reader.accept("+"):
            groups.append([])
        elif not reader.accept("|"):
            break
    if reader.peek():
        raise reader.error(f"{reader.peek()!r} does not belong here", "parts are joined by '+' or '|'")
    _check_groups(reader, groups)
    return _number_ranks(reader, [[part for part, _ in group] for group in groups])


def _part(reader: _Reader) -> Part:
    reader.skip_spaces()
    start = reader.position
    engine = reader.word()
    if engine not in ROLLOUT_ENGINES + TRAINERS:
        found = repr(engine) if engine else (repr(reader.peek()) if reader.peek() else "the end")
        if re.match(r"[dtpce]\d", reader.text[start:]):
            found = "dimensions without an engine"
        known = f"{', '.join(ROLLOUT_ENGINES)} roll out; {', '.join(TRAINERS)} train"
        raise reader.error(f"expected an engine, found {found}", f"{PART_RULE}; {known}", start)
    role = _role(reader, engine)
    reader.expect(":", f"{engine!r}", PART_RULE)
    if reader.peek() == "(":
        return _hybrid(reader, engine, role, start)
    where = reader.position
    dimensions = _dimensions(reader)
    shared = dimensions.data * dimensions.tensor * dimensions.context
    if shared % dimensions.expert:
        rule = f"e divides d x t x c (here {shared}): experts are spread over the ranks of a pipeline stage"
        raise reader.error(f"e{dimensions.expert} does not fit", rule, where)
    return Part(engine, role, dimensions)


def _role(reader: _Reader, engine: str) -> str:
    names = ("rollout",) if engine in ROLLOUT_ENGINES else TRAINER_NAMES
    if not reader.accept("["):
        return names[0]
    reader.skip_spaces()
    start = reader.position
    name = reader.word()
    if name not in names:
        raise reader.error(f"{name!r} is no name for {engine!r}", f"allowed names: {', '.join(names)}", start)
    reader.expect("]", f"the name {name!r}", PART_RULE)
    return name


def _hybrid(reader: _Reader, engine: str, role: str, start: int) -> Part:
    rule = "a hybrid is engine:(attn:dimensions|ffn:dimensions), e.g. megatron:(attn:d2p2t2c8|ffn:d2p2e16)"
    reader.expect("(", f"{engine!r}", rule)
    reader.expect("attn", "'('", rule)
    reader.expect(":", "'attn'", rule)
    attention = _dimensions(reader, refused="e")
    reader.expect("|", "the attention dimensions", rule)
    where = reader.position
    reader.expect("ffn", "'|'", rule)
    reader.expect(":", "'ffn'", rule)
    feed_forward = _dimensions(reader, refused="c")
    reader.expect(")", "the feed-forward dimensions", rule)
    if attention.size != feed_forward.feed_forward_size:
        problem = (
            f"attn has {attention.size} ranks (d x t x p x c), ffn has {feed_forward.feed_forward_size} (d x t x p x e)"
        )
        raise reader.error(problem, "both halves of a hybrid use the same ranks", where)
    if attention.pipeline != feed_forward.pipeline:
        problem = f"attn has p{attention.pipeline}, ffn has p{feed_forward.pipeline}"
        raise reader.error(problem, "both halves of a hybrid have the same pipeline stages", where)
    if engine in ROLLOUT_ENGINES:
        raise reader.error(f"{engine!r} cannot be a hybrid", "hybrids are for trainers", start)
    return Part(engine, role, attention, feed_forward)


def _dimensions(reader: _Reader, refused: str = "") -> Dimensions:
    degrees: dict[str, int] = {}
    while reader.peek() and (reader.peek().isalnum()):
        start = reader.position
        letter = reader.peek()
        if letter not in LETTERS:
            raise reader.error(f"{letter!r} is no dimension", DIMENSION_RULE)
        if letter in refused:
            rule = "attn takes d, t, p, c; ffn takes d, t, p, e"
            raise reader.error(f"{letter!r} ({LETTERS[letter]}) does not belong in this half", rule)
        reader.position += 1
        match = re.compile("[0-9]+").match(reader.text, reader.position)
        if match is None:
            raise reader.error(f"{letter!r} has no number", DIMENSION_RULE)
        if len(match.group()) > 9:
            raise reader.error(f"the number after {letter!r} is too large", f"at most {MAX_WORLD_SIZE} ranks")
        if LETTERS[letter] in degrees:
            raise reader.error(f"{letter!r} is given twice", "each dimension once", start)
        if int(match.group()) < 1:
            raise reader.error(f"{letter}{match.group()} is too small", DIMENSION_RULE, start)
        degrees[LETTERS[letter]] = int(match.group())
        reader.position = match.end()
    if not degrees:
        raise reader.error("expected dimensions", DIMENSION_RULE)
    return Dimensions(**degrees)


def _check_groups(reader: _Reader, groups: list[list[tuple[Part, int]]]) -> None:
    seen: set[str] = set()
    for group in groups:
        first = group[0][0]
        for part, position in group:
            if part.role in seen:
                rule = "one rollout part, one actor and at most one part of each other name ([critic], [ref], …)"
                raise reader.error(f"a second {part.role} part", rule, position)
            seen.add(part.role)
            if part.size != first.size:
                problem = f"{part} has {part.size} ranks, {first} has {first.size}"
                raise reader.error(problem, "parts joined by '|' share their ranks, so their sizes agree", position)
        roles = {part.role for part, _ in group}
        if "rollout" in roles and len(roles) > 1 and "actor" not in roles:
            raise reader.error(
                f"rollout shares ranks with {', '.join(sorted(roles - {'rollout'}))}",
                "rollout shares ranks with the actor, or has its own",
                group[0][1],
            )
    if "actor" not in seen:
        rule = f"one part trains the actor: {', '.join(f'{name}:d1' for name in TRAINERS)}"
        raise reader.error("no part trains the actor", rule, len(reader.text.rstrip()))


def _number_ranks(reader: _Reader, groups: list[list[Part]]) -> Placement:
    def order(group: list[Part]) -> int:
        roles = {part.role for part in group}
        return 0 if "actor" in roles else 2 if roles == {"rollout"} else 1

    def within(part: Part) -> int:
        return {"actor": 0, "rollout": 2}.get(part.role, 1)

    if sum(group[0].size for group in groups) > MAX_WORLD_SIZE:
        raise reader.error("the world is too large", f"at most {MAX_WORLD_SIZE} ranks", 0)
    parts: list[Part] = []
    start = 0
    for group in sorted(groups, key=order):
        ranks = tuple(range(start, start + group[0].size))
        parts += [replace(part, ranks=ranks) for part in sorted(group, key=within)]
        start += group[0].size
    return Placement(tuple(parts))


def place(config: RunConfig) -> Placement:
    """The placement of a run: `allocation`, or else `actor.backend` and `rollout.backend`; those given must agree."""
    text = config.allocation
    if not text.strip():
        if not config.actor.backend.strip():
            rule = "set allocation (e.g. hf:d1+fsdp:d1), or actor.backend and rollout.backend"
            raise AllocationError("nothing says which ranks do what", text, 0, rule)
        actor = _backend(config.actor.backend, "actor.backend", TRAINERS)
        if not config.rollout.backend.strip():
            return parse(str(actor), "actor.backend")
        rollout = _backend(config.rollout.backend, "rollout.backend", ROLLOUT_ENGINES)
        return parse(f"{rollout}+{actor}", "rollout.backend + actor.backend")
    placement = parse(text)
    for key, backend, part, engines in (
        ("actor.backend", config.actor.backend, placement.actor, TRAINERS),
        ("rollout.backend", config.rollout.backend, placement.rollout, ROLLOUT_ENGINES),
    ):
        if backend.strip() and (part is None or str(_backend(backend, key, engines)) != str(part)):
            given = str(part) if part else "no rollout part"
            problem = f"disagrees with allocation {text!r}, which has {given}"
            raise AllocationError(problem, backend, 0, f"{key} equals allocation's part, or is empty", key)
    return placement


def _backend(text: str, key: str, engines: tuple[str, ...]) -> Part:
    """One part, as `actor.backend` and `rollout.backend` hold it."""
    reader = _Reader(text, key)
    part = _part(reader)
    if reader.peek():
        raise reader.error(f"{reader.peek()!r} does not belong here", "a backend is one part; allocation joins several")
    if part.engine not in engines:
        raise reader.error(f"{part.engine!r} is the wrong kind of engine", f"allowed here: {', '.join(engines)}", 0)
    if part.role not in ("actor", "rollout"):
        raise reader.error(f"{part.role!r} does not belong here", "name other parts in allocation", 0)
    return part


def place_attached(config: RunConfig) -> Placement:
    """The placement of an attached world: `allocation` is one rollout part, e.g. `hf:d2`; no rank trains."""
    part = _backend(config.allocation, "allocation", ROLLOUT_ENGINES)
    return Placement((replace(part, ranks=tuple(range(part.size))),))


def check_engines(placement: Placement) -> None:
    """Refuses what parses but the engines of this version cannot do: the error names engine and dimension."""
    text = str(placement)
    for part in placement.parts:
        position = text.index(str(part))
        available = sorted(INFERENCE_ENGINES if part.role == "rollout" else TRAIN_ENGINES)
        if part.engine not in available:
            rule = f"available: {', '.join(available)}"
            raise AllocationError(f"engine {part.engine!r} is not available in this version", text, position, rule)
        if part.role not in ("actor", "rollout"):
            problem = f"a separate {part.role} is not available in this version"
            raise AllocationError(problem, text, position, "one actor and one rollout part")
        if part.feed_forward is not None:
            problem = f"engine {part.engine!r} cannot do a hybrid of attention and feed-forward layouts"
            raise AllocationError(problem, text, position, f"{part.engine}:d{part.size}")
        allowed = ENGINE_DIMENSIONS.get(part.engine, "d")
        for letter in LETTERS:
            degree = part.dimensions.degree(letter)
            if degree > 1 and letter not in allowed:
                problem = f"engine {part.engine!r} cannot do {LETTERS[letter]} parallelism ({letter}{degree})"
                names = ", ".join(f"{name} ({LETTERS[name]})" for name in allowed)
                raise AllocationError(problem, text, position, f"{part.engine} takes {names}")
        if part.role == "rollout" and part.dimensions.tensor > 1 and placement.rollout_shares_ranks:
            degree = part.dimensions.tensor
            problem = f"engine {part.engine!r} cannot do tensor parallelism (t{degree}) on the trainer's ranks"
            rule = f"ranks of their own (+), or {part.engine}:d{part.size} on the actor's (|)"
            raise AllocationError(problem, text, position, rule)


def check_has_rollout(placement: Placement) -> None:
    """Refuses an allocation with no rollout part, for runs that need one."""
    if placement.rollout is None:
        text = str(placement)
        rule = f"add one with '+' (own ranks) or '|' (the same ranks), e.g. hf:d1+{text}"
        raise AllocationError("this kind of run needs a rollout part", text, len(text), rule)
