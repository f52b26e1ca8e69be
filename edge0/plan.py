"""One memory budget: every part of a process that serves a checkpoint, in bytes, before a weight is read.

A plan is made from headers and options alone. What is loaded (parameters, LoRA, heads, caches, slots) is counted
exactly; what computing needs for a moment is an upper bound from shapes; the interpreter with its libraries is a
measured constant. The bank gets what is left. Knows nothing of reading, routing or time, and cannot see memory that
other code of the same process takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from edge0 import models
from edge0.checkpoint.schema import (
    Tensor,
    checkpoint_tensors,
    is_linear_attention,
    lora_tensors,
)
from edge0.errors import Edge0Error, ErrorKind
from edge0.families import QWEN, ModelConfig
from edge0.heap import CACHE_STEP_TOKENS
from edge0.kernels.choice import scale_dtype
from edge0.models import ling, qwen
from edge0.opening import Opening
from edge0.streaming.bank import slot_bytes
from edge0.streaming.prefill import WHOLE_LAYER_FROM, expected_coverage

# Anonymous memory beside MLX's allocator, measured on Linux with Python 3.11: 55 MiB with the engine open on a unit
# checkpoint, 64 MiB with tokenizer and server libraries, and up to 3 KiB of Python objects per slot. The rest is for
# the stacks of threads and the C library's fragmentation. Never measured on macOS.
PROCESS_BYTES = 96 << 20
TOKENIZER_FACTOR = 6  # bytes in memory per byte of tokenizer.json: 5.5 measured at 248,000 tokens, freed heap trimmed
DEFAULT_CONTEXT = 8192  # tokens, where memory is limited and nobody says how many
SMALLEST_CHUNK = 64  # tokens of a prompt at a time below which no memory is worth saving
STATES_IN_FLIGHT = 10  # delta states that the CPU backend's queue holds beside those of the piece itself
MIN_CACHE_BYTES, MAX_CACHE_BYTES = 8 << 20, 256 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """All memory of a process, in bytes; `table` prints it.

    `memory_bytes` is None where nothing is limited. `scratch_bytes` is what computing a chunk of a prompt holds at its
    peak (1.25 times the formula of `temporaries`) and, within it, `cache_bytes` of freed buffers that the allocator may
    keep. `whole_layer`: the bank holds two whole layers, the layer buffers of long prompts. `floor_bytes`: the smallest
    `memory_bytes` that would be accepted.
    """

    memory_bytes: int | None
    process_bytes: int
    tokenizer_bytes: int
    resident_bytes: int
    lora_bytes: int
    heads_bytes: int
    kv_bytes: int
    scratch_bytes: int
    cache_bytes: int
    slot_bytes: int
    bank_slots: int
    floor_slots: int
    floor_bytes: int
    whole_layer: bool
    prefill_chunk: int
    context: int

    @classmethod
    def of(cls, opening: Opening) -> MemoryPlan:
        """
        Raises:
            Edge0Error: OPTION_INVALID for a context beyond the model's; MEMORY_TOO_SMALL, BANK_TOO_SMALL, which name
                the floor.
        """
        options, config = opening.options, opening.config
        dtype = models.activation_dtype()
        item, context = dtype.size, _context(opening)
        scales = scale_dtype(options.kernels, dtype)
        slot, every = slot_bytes(opening.layout.specs, scales), len(opening.layout.records())
        floor = min(opening.floor_slots, every)
        fixed = {
            "process_bytes": PROCESS_BYTES,
            "tokenizer_bytes": _tokenizer_bytes(opening),
            "resident_bytes": resident_bytes(config, item, scales.size),
            "lora_bytes": lora_bytes(config, scales.size) if opening.lora else 0,
            "heads_bytes": heads_bytes(opening, scales.size),
            "kv_bytes": kv_bytes(config, context, item),
        }
        chunks = list(_halvings(min(options.prefill_chunk, context)))
        scratch = {chunk: _scratch(opening, chunk, context, item, slot) for chunk in chunks}
        floor_bytes = sum(fixed.values()) + sum(scratch[chunks[-1]]) + floor * slot
        if options.memory_bytes is None:
            chunk, slots = chunks[0], options.bank_slots(slot, floor, every)
        else:
            left = {chunk: options.memory_bytes - sum(fixed.values()) - sum(scratch[chunk]) for chunk in chunks}
            fits = [c for c, need in _preferences(opening, chunks, floor) if left[c] >= min(need, every) * slot]
            chunk = fits[0] if fits else chunks[-1]
            slots = min(left[chunk] // slot, every) if fits else floor
        plan = cls(
            memory_bytes=options.memory_bytes,
            **fixed,
            scratch_bytes=sum(scratch[chunk]),
            cache_bytes=scratch[chunk][1],
            slot_bytes=slot,
            bank_slots=slots,
            floor_slots=floor,
            floor_bytes=floor_bytes,
            whole_layer=options.assembly == "bank" and slots >= 2 * config.experts,
            prefill_chunk=chunk,
            context=context,
        )
        if plan.total_bytes > (options.memory_bytes or plan.total_bytes):
            raise plan._too_small(opening)
        return plan

    @property
    def bank_bytes(self) -> int:
        return self.bank_slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self._parts())

    def table(self) -> str:
        """One part per line, in MiB, then the sum, what is left over, and the floor."""
        rows = [*self._parts(), ("together", self.total_bytes, "")]
        if self.memory_bytes is not None:
            rows.append(("left over", self.memory_bytes - self.total_bytes, f"of {self.memory_bytes / MIB:,.1f} MiB"))
        rows.append(("floor", self.floor_bytes, f"{self.floor_bytes:,} bytes, with {self.floor_slots} slots"))
        return "\n".join(f"{name:<10}{nbytes / MIB:>12,.1f} MiB  {note}".rstrip() for name, nbytes, note in rows)

    def _parts(self) -> list[tuple[str, int, str]]:
        layers = "two whole layers fit" if self.whole_layer else "no two whole layers"
        return [
            ("process", self.process_bytes, "interpreter and libraries"),
            ("tokenizer", self.tokenizer_bytes, ""),
            ("resident", self.resident_bytes, "all weights but the routed experts"),
            ("lora", self.lora_bytes, ""),
            ("heads", self.heads_bytes, "prerouter"),
            ("kv", self.kv_bytes, f"caches of {self.context:,} tokens"),
            (
                "scratch",
                self.scratch_bytes,
                f"prompts by {self.prefill_chunk} tokens; {self.cache_bytes / MIB:,.1f} of it freed buffers",
            ),
            ("bank", self.bank_bytes, f"{self.bank_slots:,} slots of {self.slot_bytes:,} bytes; {layers}"),
        ]

    def _too_small(self, opening: Opening) -> Edge0Error:
        parts = ", ".join(f"{name} {nbytes / MIB:,.1f}" for name, nbytes, _ in self._parts() if nbytes)
        advice = [f"K below {opening.k}"] if opening.k > 1 else []
        advice.append(f"a context below {self.context:,} tokens")
        advice += ["--prerouter off"] if opening.heads else []
        return Edge0Error(
            ErrorKind.MEMORY_TOO_SMALL,
            "the memory budget is below the floor of this checkpoint and these options",
            path=opening.directory,
            expected=f"at least {self.floor_bytes} bytes ({self.floor_bytes / MIB:,.1f} MiB: {parts})",
            found=f"{self.memory_bytes} bytes ({self.memory_bytes / MIB:,.1f} MiB)",
            hint=f"give it more, or {', '.join(advice)}",
        )


def _context(opening: Opening) -> int:
    """Tokens that a request may have.

    Raises:
        Edge0Error: OPTION_INVALID.
    """
    options, most = opening.options, opening.config.positions
    if options.context is None:
        return most if options.memory_bytes is None else min(most, DEFAULT_CONTEXT)
    if options.context > most:
        raise Edge0Error(
            ErrorKind.OPTION_INVALID,
            "option context: the model was made for fewer tokens",
            path=opening.directory,
            expected=f"up to {most}",
            found=options.context,
        )
    return options.context


def _halvings(chunk: int) -> Iterator[int]:
    """The chunk asked for, then halves of it down to the smallest."""
    yield chunk
    while chunk > SMALLEST_CHUNK:
        chunk = max(chunk // 2, SMALLEST_CHUNK)
        yield chunk


def _preferences(opening: Opening, chunks: list[int], floor: int) -> Iterator[tuple[int, int]]:
    """Chunks with the slots that each asks for, best first: never more tokens after fewer.

    Two whole layers are worth their slots only beside chunks that touch nearly all experts. Until these fit, the chunk
    stays at the smallest such, and the bank gets what a larger one would take.
    """
    config, least = opening.config, chunks[0]
    if opening.options.assembly == "bank":
        for chunk in chunks:
            if expected_coverage(opening.k, config.experts, chunk) >= WHOLE_LAYER_FROM:
                yield chunk, max(floor, 2 * config.experts)
                least = chunk
    for chunk in chunks:
        if chunk <= least:
            yield chunk, floor


def _tokenizer_bytes(opening: Opening) -> int:
    path = opening.directory / "tokenizer.json"
    return TOKENIZER_FACTOR * path.stat().st_size if path.is_file() else 0


# --- what is loaded ------------------------------------------------------------------------------------------------


def _loaded_bytes(tensor: Tensor, item: int) -> int:
    """Bytes of a tensor once loaded: codes as they are, everything else in the activations' dtype."""
    return prod(tensor.shape) * (4 if tensor.dtype == "U32" else item)


def resident_bytes(config: ModelConfig, item: int, scale: int | None = None) -> int:
    """Parameters beside the routed experts, for activations of `item` bytes: what `models.load` keeps.

    `scale`: bytes of a scale or bias of a quantised matrix; None: as of an activation.
    """
    total = 0
    for tensor in checkpoint_tensors(config):
        if tensor.is_left_over or tensor.is_expert:
            continue
        if tensor.linear is not None and tensor.linear.name.endswith(".kv_b_proj"):
            # Kept as plain matrices, one per head (see models.ling).
            total += tensor.linear.out * tensor.linear.inp * item if tensor.name.endswith(".weight") else 0
        else:
            factor = tensor.name.endswith(models.SCALES)
            total += _loaded_bytes(tensor, scale or item if factor else item)
    return total


def lora_bytes(config: ModelConfig, item: int) -> int:
    """The recovery LoRA's two matrices per target; both halves of `kv_b_proj` list the one that they share."""
    return sum(
        _loaded_bytes(tensor, item) * (2 if tensor.name.endswith("kv_b_proj.lora_A") else 1)
        for tensor in lora_tensors(config)
    )


def heads_bytes(opening: Opening, item: int) -> int:
    """The heads whose predictions are consumed; the kernels keep them in 16 bits, as scales and the LoRA."""
    if opening.heads is None:
        return 0
    used = tuple(f"layers.{owner}." for owner in opening.schedule.owners)
    return item * sum(prod(entry.shape) for name, entry in opening.heads.tensors.items() if name.startswith(used))


# --- caches --------------------------------------------------------------------------------------------------------


def layer_cache_bytes(config: ModelConfig, layer: int, tokens: int, item: int) -> int:
    """One layer's cache as mlx-lm allocates it, with room for `tokens`; linear attention's does not grow."""
    text = config.text
    if not is_linear_attention(config, layer):
        if config.family is QWEN:
            return tokens * 2 * text["num_key_value_heads"] * text["head_dim"] * item
        return tokens * (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * item  # MLA keeps the latent
    channels, state, kernel = _linear_attention(config)
    return (kernel - 1) * channels * item + state


def _linear_attention(config: ModelConfig) -> tuple[int, int, int]:
    """Channels of the convolutions, bytes of the delta state (always fp32), and the kernel's width."""
    text = config.text
    if config.family is QWEN:
        heads, key, value = (text[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
        channels = 2 * text["linear_num_key_heads"] * key + heads * value
        return channels, heads * key * value * 4, text["linear_conv_kernel_dim"]
    heads, width = text["num_attention_heads"], text["head_dim"]
    return 3 * heads * width, heads * width * width * 4, text["short_conv_kernel_size"]


def kv_bytes(config: ModelConfig, context: int, item: int) -> int:
    """All caches of a request of `context` tokens, and the copy of one layer's while it grows.

    A cache that grows in the middle of a step of 256 tokens starts its next step there, so that it may have room for
    up to 255 tokens more than it holds.
    """
    room = context + CACHE_STEP_TOKENS - 1
    layers = [layer_cache_bytes(config, layer, room, item) for layer in range(config.layers)]
    growing = [n for layer, n in enumerate(layers) if not is_linear_attention(config, layer)]
    return sum(layers) + max(growing, default=0)


# --- what computing needs for a moment -----------------------------------------------------------------------------


def _scratch(opening: Opening, chunk: int, context: int, item: int, slot: int) -> tuple[int, int]:
    """Bytes of temporaries and of freed buffers kept, for chunks of a prompt of `chunk` tokens."""
    config = opening.config
    needed = temporaries(config, opening.k, chunk, context, item)
    kept = min(max(needed // 4, MIN_CACHE_BYTES), MAX_CACHE_BYTES)
    # A thread that reads a layer from end to end widens one of its bf16 pieces at a time.
    largest = max(spec.nbytes for spec in opening.layout.specs if spec.dtype == "BF16")
    staging = opening.options.reader_threads * config.experts * largest
    token = opening.k * len(config.moe_layers)
    if opening.options.assembly == "stack":
        # The stacks are copies: of a block of a prompt's experts, or of all that one token uses.
        staging = slot * max(config.experts, token)
    elif opening.options.assembly == "patch":
        staging = slot * (config.experts + token)  # the patched stacks stay, also while a prompt's are built
    return needed * 5 // 4 + staging, kept


def temporaries(config: ModelConfig, k: int, chunk: int, context: int, item: int) -> int:
    """Arrays alive at once at the peak of a chunk of a prompt, checked against MLX's own peak on CPU.

    Chunk-sized: the residual stream, norms, the clip, the shared expert, router scores. Beside them the largest of:
    attention on one piece (scores are written out: attention is not fused on CPU), a dense layer, and the routed
    experts, whose sorted gather holds 4 rows of hidden and 2 of expert width for each of the chunk x K pairs. Last, the
    sampler's copies of the logits. With the safety of 1.25 this was 1.4 to 2.4 times the measured peak: unit and mini
    checkpoints of both families, K=4 and 8, chunks of 64 to 2,048 tokens, on demand and by whole layers. Not measured
    on a GPU.
    """
    text = config.text
    if config.family is QWEN:
        shared, dense = text["shared_expert_intermediate_size"], 0
    else:
        shared = text["moe_shared_expert_intermediate_size"] * text["num_shared_experts"]
        dense = 3 * chunk * text["intermediate_size"] * item
    stream = chunk * (10 * config.hidden + 3 * shared + 4 * config.experts) * item
    pairs = chunk * k * (4 * config.hidden + 2 * config.expert_width) * item
    family = qwen if config.family is QWEN else ling
    attention = max(
        _linear_temporaries(config, min(chunk, family.DELTA_TOKENS), item),
        _full_temporaries(config, min(chunk, family.FULL_TOKENS), context, item),
    )
    return stream + max(pairs, dense, attention) + 8 * config.vocab * 4


def _linear_temporaries(config: ModelConfig, tokens: int, item: int) -> int:
    """Projections, convolutions and normalised copies; on CPU one delta state per token of the piece stays alive."""
    channels, state, _ = _linear_attention(config)
    states = tokens + STATES_IN_FLIGHT if item == 4 else 2
    return tokens * (8 * channels + 2 * config.hidden) * item + states * state


def _full_temporaries(config: ModelConfig, tokens: int, context: int, item: int) -> int:
    """A score and a mask for every pair of tokens, and keys and values in the form that attention reads."""
    text, heads = config.text, config.text["num_attention_heads"]
    if config.family is QWEN:
        scores, width, pair = 1, 8 * text["head_dim"], 2 * text["num_key_value_heads"] * text["head_dim"]
    else:  # MLA: positional scores and scores; keys and values are expanded out of the whole latent cache
        scores, width = 2, 4 * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"] + text["v_head_dim"])
        pair = heads * (text["qk_nope_head_dim"] + text["v_head_dim"]) + text["kv_lora_rank"]
    return (heads * tokens * (scores * context + width) + context * pair) * item + tokens * context
