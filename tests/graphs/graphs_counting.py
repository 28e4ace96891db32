"""A step that can feed itself: each token depends on all before it, through paged state."""

import torch

from ostinato.graphs import Add, BatchView, BufferSpec, BurstRules, Feed, Slot

VOCAB, PAGE_SIZE, PAGES, COLUMNS = 97, 4, 40, 8
PAD_PAGE = 0

RULES = BurstRules(
    {
        "tokens": Feed("tokens"),
        "positions": Add(1),
        "slots": Slot(table="pages", positions="positions", page_size=PAGE_SIZE),
        "mixed": Feed("mixed"),
    },
    max_steps=24,
    max_stops=3,
)


def _below(limit):
    return lambda generator, shape: torch.randint(limit, shape, generator=generator)


SPECS = {
    "tokens": BufferSpec((), torch.int64, 0, _below(VOCAB)),
    "positions": BufferSpec((), torch.int32, 0),
    "slots": BufferSpec((), torch.int64, -1),
    "pages": BufferSpec((COLUMNS,), torch.int32, PAD_PAGE),
    "mixed": BufferSpec((2,), torch.float32, 0.5),
    "scale": BufferSpec((), torch.float32, 1.0),
}


class CountingStep:
    """Writes the token at its slot, then adds up what the row's pages hold up to its position."""

    def __init__(self, device: torch.device | str) -> None:
        self.state = torch.zeros(PAGES * PAGE_SIZE + 1, dtype=torch.int64, device=device)
        self.columns = torch.arange(COLUMNS * PAGE_SIZE, device=device)
        self.calls = 0

    def __call__(self, batch: BatchView) -> dict[str, torch.Tensor]:
        self.calls += 1
        # Padding writes behind the end, where nobody reads.
        slots = torch.where(batch.slots < 0, PAGES * PAGE_SIZE, batch.slots)
        self.state.index_copy_(0, slots, batch.tokens)
        places = batch.pages[:, self.columns // PAGE_SIZE] * PAGE_SIZE + self.columns % PAGE_SIZE
        seen = self.columns <= batch.positions[:, None]
        total = (self.state[places] * (self.columns + 1) * seen).sum(1)
        mixed = (batch.mixed + total[:, None] * batch.scale[:, None] / 7).remainder(11)
        return {"tokens": (total + mixed[:, 0].long() + 1) % VOCAB, "mixed": mixed}


def first_inputs(n: int, *, pages: int = COLUMNS, start: int = 1) -> dict[str, torch.Tensor]:
    """Return rows at position `start` with so many pages each."""
    table = torch.full((n, COLUMNS), PAD_PAGE, dtype=torch.int32)
    order = 1 + torch.randperm(PAGES - 1).int()
    for row in range(n):
        table[row, :pages] = order[row * pages : (row + 1) * pages]
    positions = torch.full((n,), start, dtype=torch.int32)
    pages_now = table[torch.arange(n), positions.long() // PAGE_SIZE]
    return {
        "tokens": torch.randint(VOCAB, (n,)),
        "positions": positions,
        "slots": (pages_now * PAGE_SIZE + positions % PAGE_SIZE).long(),
        "pages": table,
        "mixed": torch.rand(n, 2),
        "scale": torch.rand(n),
    }


def stepped(runner, inputs, limits, stops) -> list[list[int]]:
    """Return the tokens of each row by as many calls of `run`, fed by hand, rows leaving."""
    rows = list(range(len(limits)))
    tokens: list[list[int]] = [[] for _ in rows]
    inputs = {name: value.clone() for name, value in inputs.items()}
    while rows:
        outputs = runner.run(len(rows), {name: value[rows] for name, value in inputs.items()})
        fresh, mixed = outputs["tokens"].tolist(), outputs["mixed"].cpu()
        for at, row in enumerate(list(rows)):
            tokens[row].append(fresh[at])
            inputs["tokens"][row] = fresh[at]
            inputs["mixed"][row] = mixed[at]
            inputs["positions"][row] += 1
            position = int(inputs["positions"][row])
            if fresh[at] in stops[row] or len(tokens[row]) == limits[row]:
                rows.remove(row)
                continue
            page = int(inputs["pages"][row, position // PAGE_SIZE])
            inputs["slots"][row] = page * PAGE_SIZE + position % PAGE_SIZE
    return tokens
