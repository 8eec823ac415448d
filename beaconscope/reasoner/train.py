"""Train the bundled reasoner from scratch: ``python -m beaconscope.reasoner.train --out DIR``.

1. Problems are drawn afresh for every step, all of one size in a batch, so that its rows have equal length.
2. The loss is the cross entropy of the chain of thought; tokens that need a recall weigh more, as there are few.
3. Two linear probes, thrown away afterwards, help retrieval to start: after the first layer each digit and plan entry
   should tell the name it stands under, and after the second the place that needs a letter's digit should tell it.
   In the first stages the second layer is also told where to look (one of its heads, whichever looks there most);
   the last and longest stage does without.
4. Sizes grow in stages, each left when its recalled tokens are nearly all right; a fifth of the batches repeats an
   earlier stage.
5. In half of the batches a random gap of positions lies between the prompt and the chain, so that
   distance does not matter.
6. In some batches of the last stage no position sees farther back than a random window, so that the model learns to
   be unsure, and not to make something up, where it cannot see what it needs.
7. From the third stage on attention that goes far back costs something at positions that need no recall, in every head
   and layer, so that a look back is an event and not a habit. In the last stage, when everything is learned, it costs
   much, and the second layer is told again where to look, so that the looks that are needed stay sharp.
8. AdamW, a short warm-up, a constant rate; the last two stages have a fixed number of steps, and end in a cosine to
   zero.

A run is a function of its seed and options up to the order of floating-point sums, and resumes from its checkpoint.
At its end the model is written to ``DIR/model`` as the package holds it, and measured (``evaluate``). ``--quick`` runs
50 small steps, and fails unless the loss fell.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import __version__ as transformers_version
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from beaconscope.reasoner.evaluate import SINKS, evaluate
from beaconscope.reasoner.task import SIZES, Problem, Size, Solution, make_problem, solve
from beaconscope.reasoner.tokenizer import make_tokenizer
from beaconscope.reasoner.vocabulary import DIGITS, EOS, PAD, WORDS, encode

IGNORE = -100
_FIRST_DIGIT = encode(DIGITS[:1])[0]


@dataclass(frozen=True)
class Stage:
    """The sizes of a part of the training; both ends of a range count."""

    letters: tuple[int, int]
    steps: tuple[int, int]
    tokens: int
    """Tokens of a batch."""
    guided: bool = False
    """Whether the loss tells the second layer where to look."""
    thrift: float = 0.0
    """Weight of what looking far back costs where no recall is needed."""
    blind: float = 0.0
    """Share of batches in which no position sees farther back than a random window."""
    lasts: int | None = None
    """Steps that it lasts; None is until its recalls are nearly all right."""
    decays: int = 0
    """Steps at its end over which the rate falls to zero."""
    rate: float = 1.0
    """Factor of the learning rate."""
    largest: float = 0.0
    """Share of batches that have the most steps."""

    def draw(self, rng: random.Random) -> Size:
        """Draw a size; about a fifth of the steps keep their total."""
        steps = self.steps[1] if rng.random() < self.largest else rng.randint(*self.steps)
        kept = max(0, min(8, round(steps * rng.uniform(0.1, 0.3))))
        return Size(rng.randint(*self.letters), steps, min(kept, steps - 1))


STAGES = (
    Stage(letters=(3, 4), steps=(3, 4), tokens=2048, guided=True),
    Stage(letters=(3, 8), steps=(3, 8), tokens=2048, guided=True),
    Stage(letters=(6, 10), steps=(6, 21), tokens=4096, guided=True, thrift=0.1),
    Stage(letters=(6, 10), steps=(10, 43), tokens=4096, thrift=0.1, largest=0.3, blind=0.15, lasts=1700, decays=1300),
    Stage((6, 10), (10, 43), 4096, guided=True, thrift=3.0, largest=0.3, blind=0.15, lasts=500, decays=450, rate=0.5),
)


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run."""

    seed: int = 0
    learning_rate: float = 2e-3
    warmup: int = 100
    most_steps: int = 8000
    """Steps after which the run ends, whatever stage it has reached."""
    weight_decay: float = 0.05
    recall_weight: float = 1.0
    """Weight of the mean loss of recalled tokens, beside the mean of all."""
    probe_weight: float = 0.3
    aim_weight: float = 0.3
    near: int = 64
    """Positions back up to which looking is free."""
    thrift_rows: int = 48
    """Positions of a batch at which the cost of looking far is measured."""
    advance_at: float = 0.94
    """Running share of recalled tokens that have to be right before a stage is left."""
    largest_gap: int = 100
    batch_scale: float = 1.0
    """Batches hold this many times the tokens that their stage says."""

    def rate(self, step: int, stage: Stage, began: int) -> float:
        """Learning rate of a step in a stage that began at the step ``began``."""
        rate = self.learning_rate * stage.rate * min(1.0, (step + 1) / self.warmup)
        if stage.lasts is None or not stage.decays:
            return rate
        decayed = max(0, step - (began + stage.lasts - stage.decays))
        return rate * 0.5 * (1 + math.cos(math.pi * decayed / stage.decays))


def _over(stage: Stage, began: int, step: int) -> bool:
    """Whether a stage of a fixed number of steps is over before this step."""
    return stage.lasts is not None and step >= began + stage.lasts


def make_model(seed: int) -> LlamaForCausalLM:
    """Make the untrained model, with weights from ``seed``."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Batch:
    """Problems of one size with their solutions. B rows of L tokens."""

    tokens: Tensor  # [B, L]
    targets: Tensor  # [B, L], the next token, IGNORE in the prompt
    recalls: Tensor  # [B, L], bool, where the next token is a recall
    names: Tensor  # [B, L], the name that a digit or plan entry stands under, or IGNORE
    values: Tensor  # [B, L], the recalled digit where it is needed, or IGNORE
    rows: Tensor  # [B, R], positions whose next token is a recall
    aims: Tensor  # [B, R], the position of what each of them recalls


def make_batch(examples: list[tuple[Problem, Solution]]) -> Batch:
    """Put problems of one size into tensors."""
    rows = [[*problem.prompt_ids, *solution.token_ids] for problem, solution in examples]
    tokens = torch.tensor(rows)  # [B, L]
    targets = torch.full_like(tokens, IGNORE)
    recalls = torch.zeros_like(tokens, dtype=torch.bool)
    names = torch.full_like(tokens, IGNORE)
    values = torch.full_like(tokens, IGNORE)
    rows_at = torch.zeros(len(rows), len(examples[0][1].recalls), dtype=torch.long)
    aims = torch.zeros_like(rows_at)
    prompt_length = len(examples[0][0].prompt_ids)
    targets[:, prompt_length - 1 : -1] = tokens[:, prompt_length:]
    for index, (_, solution) in enumerate(examples):
        row = rows[index]
        for number, recall in enumerate(solution.recalls):
            at = recall.position - 1
            begin, _ = recall.sources[0]
            # A definition reads "letter = digit ,", an entry of the plan "label operation letter ;".
            aim = begin + (1 if recall.kind == "operation" else 2)
            recalls[index, at] = True
            names[index, at] = names[index, aim] = row[begin]
            rows_at[index, number], aims[index, number] = at, aim
            if recall.kind == "value":
                values[index, at] = row[aim] - _FIRST_DIGIT
    return Batch(tokens, targets, recalls, names, values, rows_at, aims)


class Probed(nn.Module):
    """The model with its two training probes."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model
        hidden = model.config.hidden_size
        self.name_probe = nn.Linear(hidden, len(WORDS))
        self.value_probe = nn.Linear(hidden, 10)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        targets: Tensor,
        recalls: Tensor,
        names: Tensor,
        values: Tensor,
        rows: Tensor,
        aims: Tensor,
        mask: Tensor | None = None,
        thrift_rows: Tensor | None = None,
        near: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Losses of all chain tokens, recalled tokens, probes, aim and thrift, and the share of recalls right.

        The layers are called one by one, because the library takes positions with a gap for packed sequences.
        """
        inner = self.model.model
        hidden = inner.embed_tokens(tokens)  # [B, L, d]
        rotary = inner.rotary_emb(hidden, positions)
        probes: list[Tensor] = []
        aim = thrift = hidden.new_zeros(())
        for depth, layer in enumerate(inner.layers):
            if depth == 1:
                aim = _aim_loss(layer, hidden, rotary, rows, aims, values.gather(1, rows) != IGNORE)
            if thrift_rows is not None:
                far = _far_loss(layer, hidden, rotary, thrift_rows, ~recalls[:, thrift_rows], near)
                thrift = thrift + far / len(inner.layers)
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
            if depth == 0:
                probes.append(_loss(self.name_probe(hidden), names))
            if depth == 1:
                probes.append(_loss(self.value_probe(hidden), values))
        logits = self.model.lm_head(inner.norm(hidden))  # [B, L, V]
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none"
        ).view_as(targets)
        every = losses.sum() / (targets != IGNORE).sum()
        recalled = (losses * recalls).sum() / recalls.sum()
        right = ((logits.argmax(-1) == targets) & recalls).sum() / recalls.sum()
        return every, recalled, probes[0] + probes[1], aim, thrift, right


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


def _aim_loss(
    layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], rows: Tensor, aims: Tensor, of_value: Tensor
) -> Tensor:
    """Mean of -log attention on what a row has to recall, in the head that puts most there over the batch.

    ``hidden`` is what enters the layer, [B, L, d]; ``rows``, ``aims``, ``of_value`` are [B, R]. Recalls of values and
    of the plan may each have a head of their own. The best head is that of the whole batch: were it chosen row by row,
    heads that look at a fixed entry each would do.
    """
    logs = _log_attention(layer, hidden, rotary, rows)  # [B, H, R, L]
    _, heads, count, _ = logs.shape
    on = logs.gather(3, aims[:, None, :, None].expand(-1, heads, count, 1))[..., 0]  # [B, H, R]
    loss = hidden.new_zeros(())
    for chosen in (of_value, ~of_value):
        mean = (on * chosen[:, None]).sum((0, 2)) / chosen.sum()  # [H]
        loss = loss - 0.5 * mean.amax()
    return loss


def _far_loss(
    layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], rows: Tensor, free: Tensor, near: int
) -> Tensor:
    """Mean of -log attention that stays with the sinks and the last ``near`` positions, over heads.

    ``rows`` is [R], the same in all rows of the batch; ``free``, [B, R], says which of them need no recall.
    """
    logs = _log_attention(layer, hidden, rotary, rows.expand(len(hidden), -1))  # [B, H, R, L]
    column = torch.arange(hidden.shape[1])
    far = (column >= SINKS) & (rows[:, None] - column > near)  # [R, L]
    kept = logs.masked_fill(far, -torch.inf).logsumexp(-1).mean(1)  # [B, R]
    return -(kept * free).sum() / free.sum()


def _log_attention(layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
    """Log attention of ``rows``, [B, R], in each head, [B, H, R, L]; ``hidden`` is what enters the layer, [B, L, d]."""
    attention = layer.self_attn
    size = attention.head_dim
    normed = layer.input_layernorm(hidden)
    batch, length, _ = hidden.shape
    query = attention.q_proj(normed).view(batch, length, -1, size).transpose(1, 2)  # [B, H, L, D]
    key = attention.k_proj(normed).view(batch, length, -1, size).transpose(1, 2)  # [B, H / G, L, D]
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    heads, count = query.shape[1], rows.shape[1]
    query = query.gather(2, rows[:, None, :, None].expand(batch, heads, count, size))  # [B, H, R, D]
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    scores = query @ key.transpose(2, 3) * size**-0.5  # [B, H, R, L]
    unseen = torch.arange(length)[None, None] > rows[:, :, None]  # [B, R, L]
    logs: Tensor = scores.masked_fill(unseen[:, None], -torch.inf).log_softmax(-1)
    return logs


def _positions(prompt_length: int, length: int, gap: int) -> Tensor:
    positions = torch.arange(length)
    positions[prompt_length:] += gap
    return positions[None]  # [1, L]


def _window(length: int, window: int) -> Tensor:
    """Mask under which a row sees the last ``window`` positions and the sinks, [1, 1, L, L]."""
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    return ((column <= row) & ((row - column <= window) | (column < SINKS)))[None, None]


def _draw_size(stage: int, rng: random.Random) -> Size:
    earlier = stage > 0 and rng.random() < 0.2
    return STAGES[rng.randrange(stage) if earlier else stage].draw(rng)


def train(recipe: Recipe, out: Path, *, resume: bool = False, compiled: bool = True, seconds: float = 120) -> Path:
    """Train and write ``model.pt`` (a checkpoint, every ``seconds``) and ``curve.jsonl`` into ``out``.

    Returns
    -------
    Path
        The checkpoint.
    """
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "model.pt"
    probed = Probed(make_model(recipe.seed))
    decayed = [p for p in probed.parameters() if p.ndim > 1]
    rest = [p for p in probed.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
    )
    rng = random.Random(recipe.seed)
    state: dict[str, Any] = {"step": 0, "stage": 0, "began": 0, "running": 0.0, "tokens": 0, "seconds": 0.0}
    if resume:
        saved = torch.load(checkpoint, weights_only=True)
        probed.load_state_dict(saved["probed"])
        optimizer.load_state_dict(saved["optimizer"])
        rng.setstate(saved["rng"])
        state = saved["state"]
    if compiled:  # Layer by layer: they share one compiled form, which takes a quarter of the time.
        for layer in probed.model.model.layers:
            layer.compile(dynamic=True)

    def save() -> None:
        part = checkpoint.with_suffix(".part")
        kept = {"probed": probed.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng.getstate()}
        torch.save({**kept, "state": state}, part)
        os.replace(part, checkpoint)

    begin = saved_at = time.monotonic()
    before = state["seconds"]
    with (out / "curve.jsonl").open("a" if resume else "w", encoding="utf-8") as curve:
        while state["stage"] < len(STAGES) and state["step"] < recipe.most_steps:
            size = _draw_size(state["stage"], rng)
            length = size.prompt_length + size.trace_length
            rows = max(2, round(recipe.batch_scale * STAGES[state["stage"]].tokens / length))
            problems = [make_problem(size, rng) for _ in range(rows)]
            batch = make_batch([(problem, solve(problem)) for problem in problems])
            gap = rng.randrange(recipe.largest_gap) if rng.random() < 0.5 else 0
            stage = STAGES[state["stage"]]
            blind = stage.blind > 0 and rng.random() < stage.blind
            thrifty = stage.thrift > 0 and not blind
            measured = rng.sample(range(size.prompt_length, length), recipe.thrift_rows) if thrifty else []
            rate = recipe.rate(state["step"], stage, state["began"])
            for group in optimizer.param_groups:
                group["lr"] = rate
            positions = _positions(size.prompt_length, length, gap)
            every, recalled, probe, aim, thrift, right = probed(
                batch.tokens,
                positions,
                batch.targets,
                batch.recalls,
                batch.names,
                batch.values,
                batch.rows,
                batch.aims,
                _window(length, rng.randint(40, 128)) if blind else None,
                torch.tensor(measured) if thrifty else None,
                recipe.near,
            )
            loss = every + recipe.recall_weight * recalled
            if not blind:
                loss = loss + recipe.probe_weight * probe
            if stage.guided:
                loss = loss + recipe.aim_weight * aim
            if thrifty:
                loss = loss + stage.thrift * thrift
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(probed.parameters(), 1.0)
            optimizer.step()

            if not blind:
                state["running"] = 0.97 * state["running"] + 0.03 * float(right)
            state["tokens"] += rows * length
            state["seconds"] = before + time.monotonic() - begin
            over = _over(stage, state["began"], state["step"] + 1)
            if state["step"] % 20 == 0 or over or state["step"] + 1 == recipe.most_steps:
                line = {
                    "step": state["step"],
                    "stage": state["stage"],
                    "steps_of_plan": size.steps,
                    "blind": blind,
                    "loss": round(float(every.detach()), 5),
                    "recall_loss": round(float(recalled.detach()), 5),
                    "probe_loss": round(float(probe.detach()), 5),
                    "aim_loss": round(float(aim.detach()), 5),
                    "thrift_loss": round(float(thrift.detach()), 5),
                    "recall_accuracy": round(state["running"], 5),
                    "rate": round(rate, 7),
                    "tokens": state["tokens"],
                    "seconds": round(state["seconds"], 1),
                }
                curve.write(json.dumps(line) + "\n")
                curve.flush()
            if over or (stage.lasts is None and state["running"] >= recipe.advance_at):
                state.update(stage=state["stage"] + 1, began=state["step"] + 1, running=0.0)
            state["step"] += 1
            if time.monotonic() - saved_at > seconds:
                save()
                saved_at = time.monotonic()
    save()
    return checkpoint


def export(checkpoint: Path, recipe: Recipe, folder: Path) -> None:
    """Write a trained model as a folder that transformers loads, with how it came about.

    ``training.json`` has the recipe, the versions, the checksum of the weights and the last line of the curve;
    ``curve.jsonl`` is the whole of it.
    """
    saved = torch.load(checkpoint, weights_only=True)
    probed = Probed(make_model(recipe.seed))
    probed.load_state_dict(saved["probed"])
    generation: Any = probed.model.generation_config
    generation.update(do_sample=False)
    probed.model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    curve = (checkpoint.parent / "curve.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "curve.jsonl").write_text("\n".join(curve) + "\n", encoding="utf-8")
    record = {
        "licence": "Apache-2.0",
        "recipe": asdict(recipe),
        "stages": [asdict(stage) for stage in STAGES],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers_version,
        },
        "parameters": sum(weight.numel() for weight in probed.model.parameters()),
        "sha256": {"model.safetensors": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()},
        "last": json.loads(curve[-1]),
    }
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def quick(out: Path, seed: int) -> tuple[float, float]:
    """Run 50 small steps.

    Returns
    -------
    tuple of float
        The loss of the first and of the last logged step.
    """
    train(Recipe(most_steps=50, seed=seed, warmup=10, batch_scale=0.25), out, compiled=False)
    curve = [json.loads(line) for line in (out / "curve.jsonl").read_text(encoding="utf-8").splitlines()]
    return curve[0]["loss"], curve[-1]["loss"]


def main() -> None:
    """Read the options, train, write the model, measure it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most-steps", type=int, default=Recipe.most_steps, help="end after these, whatever stage")
    parser.add_argument("--rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    parser.add_argument("--eager", action="store_true", help="do without torch.compile; slower, no compiler needed")
    parser.add_argument("--quick", action="store_true", help="50 small steps that must lower the loss")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick:
        first, last = quick(options.out, options.seed)
        print(f"loss {first:.3f} -> {last:.3f}")
        if last >= first:
            raise SystemExit("the loss did not fall in 50 steps")
        return
    recipe = Recipe(most_steps=options.most_steps, seed=options.seed, learning_rate=options.rate)
    checkpoint = train(recipe, options.out, resume=options.resume, compiled=not options.eager)
    folder = options.out / "model"
    export(checkpoint, recipe, folder)
    result = evaluate(folder, list(SIZES), count=500, control=200, traces=20, seed=1_000_000)
    (folder / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"Wrote {folder}")


if __name__ == "__main__":
    main()
