"""Every column of the raw rows, as text: `name kind unit: meaning`, one a line, in the order of the table.

A kind with a question mark may be empty: a void run has no numbers, and some counters exist on one system only.
"""

RUNS = """
session text -: Name of the session, the UTC time at which it began; the same in every row of a folder.
tier text -: Name of the checkpoint under which results are kept.
run_id text -: Names the run within its session; steps and loads refer to it.
order integer -: Place in the session's order of time, from 0.
round integer -: Round of the plan, from 0; runs of one round are compared with each other.
role text -: What the run is for: arm, aa (an arm against itself) or drift (the first run again, at the end).
arm text -: Way of serving, one of experiments/arms.py.
k integer experts: Experts that each token is routed to in each layer.
condition text -: State that the page cache was brought into: cold, warm, limit, budget:SHARE or budget:SIZE.
budget_by text -: Who kept the budget: eviction (our own), cgroup or balloon (macOS).
memory_limit_bytes integer? bytes: Limit on all memory of the process; above it the run was killed.
lower_cache text -: Whether a host below this machine may keep the file: none, suspected or unknown.
layout text -: How experts lie in the files: stacked (as released) or records (repacked).
reader text -: How experts are read: pread, willneed (advice first), mmap, direct, or none (all in memory).
fill text -: Who fills memory: readers, engine (its own thread), or none (all in memory, or another engine).
assembly text -: How read experts become operands: bank, stack, patched stacks, or none (resident, another engine).
launch_groups integer groups: Groups of layers that a step is launched in.
kernels text -: What computes: mlx (MLX's own), int8-VARIANT or exact-VARIANT (8-bit or fp32 activations), llama.cpp.
trace text -: File of routes that was replayed, empty where the model routed.
tok_s number? tokens/s: Timed steps over the sum of their step_ms.
timed_steps integer? steps: Decode steps that were timed.
warmup_steps integer? steps: Decode steps before them, all warm-ups together.
steady flag? -: Whether loads and cold share held still at the end of the warm-up.
probe text? -: How the page cache was looked at.
fault_window text? -: How read-ahead of page faults was set: lowered, as-is, random, or none (no faults).
bank_bytes integer? bytes: Memory for experts, 0 where all are resident.
bank_slots integer? experts: The same in experts.
resident_bytes integer? bytes: Parameters that stay in memory besides the bank; of another engine its whole model.
alloc_load_peak_bytes integer? bytes: Highest live bytes of MLX's allocator while loading; empty for other engines.
alloc_active_bytes integer? bytes: Live bytes of MLX's allocator at the end.
alloc_cache_bytes integer? bytes: Freed buffers that the allocator kept at the end.
alloc_peak_bytes integer? bytes: Highest live bytes of MLX's allocator since loading.
rss_anon_bytes integer? bytes: Anonymous memory of the process; on macOS its physical footprint.
rss_file_bytes integer? bytes: File pages mapped into the process (Linux).
rss_bytes integer? bytes: Resident size of the process.
rss_peak_bytes integer? bytes: Highest resident size, mapped file pages included; never falls.
swap_bytes integer? bytes: Memory of the process that was swapped out (Linux).
budget_bytes integer? bytes: Page cache that experts may keep; empty where there is no budget.
cached_before_bytes integer? bytes: Bytes of the checkpoint in the page cache before the warm-up.
cached_after_bytes integer? bytes: The same after the last timed step.
foreign_device_bytes integer? bytes: What the checkpoint's disk delivered while steps were timed, less our own reads.
checkpoint_bytes integer? bytes: Size of the files that hold experts.
large_page_bytes integer? bytes: Anonymous memory in pages of 2 MiB at the end (Linux); absent before December 2026.
stolen_share number? -: Of the processors' time while steps were timed, given to others by a hypervisor; as above.
dropped integer experts: Routed experts that took no part; anything above 0 voids the run.
token_hash text? -: Digest of prompt, warm-up and timed tokens: equal in every run of a session.
output_hash text? -: Digest of the tokens that the arm itself chose.
void flag -: Whether the run gives no number.
void_reason text -: Why, empty where it is not void.
"""

STEPS = """
run_id text -: The run in runs.parquet.
step integer -: Timed decode step, from 0.
timed flag -: Whether the step is timed; always true.
step_ms number ms: Time of the step on the engine thread, without time spent observing.
wait_ms number ms: Part of it: waiting for reads, or itself reading, copying and stacking.
wait_predicted_ms number ms: Part of wait_ms in layers that heads would predict.
wait_gate_ms number ms: Part of wait_ms in all other layers.
route_ms number ms: Part of step_ms: waiting for a router's choice.
launch_ms number ms: Part of step_ms: handing work to MLX.
evaluate_ms number ms: Part of step_ms: waiting for work that was launched.
sample_ms number ms: Part of step_ms: bringing the chosen token to the host.
build_ms number ms: What is left of step_ms: Python, and graphs that are built.
compute_ms number ms: route_ms + launch_ms + evaluate_ms.
cpu_ms number ms: Processor time of all threads during the step, observing included.
loads integer loads: Expert reads that the step asked for.
loads_predicted integer loads: Those of layers that heads would predict.
hits integer? experts: Experts that the step asked for, for itself or for the next, that needed no read of their own.
read_calls integer calls: Reads asked of the operating system.
asked_bytes integer bytes: Bytes of the step's loads.
probed_bytes integer bytes: Bytes of those loads before which the page cache was looked at.
cold_bytes integer bytes: Bytes that were not in the page cache, of probed_bytes.
inflight_bytes integer bytes: Bytes that were on their way into the page cache, of probed_bytes.
device_bytes integer bytes: What the storage delivered to the threads that read; on macOS with several, to the process.
load_busy_ms number ms: Time during which at least one load was under way.
load_busy_predicted_ms number ms: The same of loads for layers that heads would predict.
dropped integer experts: Routed experts that took no part in the step.
"""

LOADS = """
run_id text -: The run in runs.parquet.
step integer -: Step that asked for the read; 0 is the first timed one, below 0 is warm-up and prompt.
layer integer -: Layer of the model, from 0.
expert integer -: Expert in it, from 0; -1 for a stacked tensor of a whole layer.
purpose text -: What it was read for, such as prefetch (a prediction), demand or prefill.
predicted_layer flag -: Whether heads would predict the layer, in every arm.
asked_bytes integer bytes: Bytes of the expert.
calls integer calls: Reads asked of the operating system.
submit_ns integer ns: When the read was asked for, on the system's monotonic clock.
start_ns integer ns: When it began, after the page cache was looked at.
end_ns integer ns: When it was done.
advise_ns integer ns: Time of it that went into telling the kernel of all ranges.
thread integer -: Native id of the thread that read.
cold_bytes integer bytes: Bytes that were not in the page cache; -1 where nobody looked.
cold_page_bytes integer bytes: Bytes of cold pages that it touches, the least that a device reads; -1: nobody looked.
inflight_bytes integer bytes: Bytes that were on their way there; -1 where nobody looked.
device_bytes integer bytes: What the storage delivered to this thread; -1 where it is not known.
"""

LOAD_COST = """
order integer -: Place in the order of time, from 0.
role text -: load, or reference: one and the same cold direct read, again and again, which shows drift.
way text -: How it was read: mmap (page faults), pread, willneed (advice first) or direct.
layout text -: Which checkpoint: stacked (as released) or records (repacked).
target_cold number share: Share of the expert's pages that was to be cold.
repetition integer -: Number of this way, layout and share, from 0.
layer integer -: Layer of the model, from 0.
expert integer -: Expert in it, from 0.
asked_bytes integer bytes: Bytes of the expert.
cold_bytes integer bytes: Bytes of it that were not in the page cache.
inflight_bytes integer bytes: Bytes of it that were on their way there.
cold_page_bytes integer bytes: Bytes of the cold pages that it touches, which is what a device reads at least.
cold_pieces integer pieces: Contiguous pieces of the expert that were cold in part or whole.
device_bytes integer? bytes: What the storage delivered to this thread; empty where it is not known.
advise_ns integer ns: Time that went into telling the kernel of all ranges.
read_ns integer ns: Time that reading took after it.
ns integer ns: Time of the whole load, advise_ns + read_ns.
build_ns integer ns: Time to make the nine arrays of the paper's bundle, not part of ns.
"""

PREFILL = """
role text -: What the prompt is for: arm, or aa (the first way against itself).
round integer -: Round of the plan, from 0; prompts of one round are compared with each other.
model text -: Directory of the checkpoint.
k integer experts: Experts that each token is routed to in each layer.
way text -: How experts are read: ondemand, whole-layer, or auto (the engine's choice).
condition text -: State that the page cache was brought into: cold or warm.
tokens integer tokens: Length of the prompt.
ttft_ms number ms: Time from the prompt to the first token.
first_token integer -: The token that was chosen; equal for all ways.
device_bytes integer? bytes: What the storage delivered to the process; empty where it is not known.
cached_before_bytes integer bytes: Bytes of the checkpoint in the page cache before the prompt.
experts_read integer experts: Expert reads that the prompt asked for.
asked_bytes integer bytes: Bytes of them.
read_calls integer calls: Reads asked of the operating system.
wait_ms number ms: Part of ttft_ms: waiting for reads.
layers integer layers: Layers with experts.
experts integer experts: Experts of each of them.
"""

KERNELS = """
order integer -: Place in the order of time, from 0.
round integer -: Round, from 0; rows of one round are compared with each other.
kernels text -: What computes: mlx (MLX's own), int8-VARIANT or exact-VARIANT.
served text -: Who decodes: engine (with its adapters), engine-bare (without), resident (stock mlx-lm).
k integer experts: Experts that each token is routed to in each layer.
threads integer threads: Of the kernels, with the engine's own.
steps integer steps: Decode steps that the row is the mean of.
step_ms number ms: Time of a step.
cpu_ms number ms: Processor time of all threads during it.
loads integer loads: Expert reads that the steps asked for: 0 once every expert in use is in memory.
attention_ms number ms: Part of step_ms: full attention of 35b, with its projections and norms; 0 for mlx, as all below.
latent_ms number ms: Full attention of 8b, likewise.
delta_ms number ms: Linear attention, likewise.
experts_ms number ms: Routed experts.
gated_ms number ms: Shared experts and dense layers.
linears_ms number ms: Logits of routers and of the head.
route_ms number ms: The routing law.
dense_ms number ms: Prerouter heads, and routers that are not quantised.
combine_ms number ms: Adding a layer's parts up.
mixture_ms number ms: A token's routed and shared experts and what they add up to, in one call.
"""

WORK = """
order integer -: Place in the order of time, from 0.
round integer -: Round, from 0; rows of one round are compared with each other.
kernels text -: What computes: mlx (MLX's own), int8-VARIANT or exact-VARIANT.
steps integer steps: Decode steps that the row is the mean of.
k integer experts: Experts that each token is routed to in each layer.
layers integer layers: Of the model.
experts integer experts: Of each layer.
step_ms number ms: Time of a step, every expert in memory.
cpu_ms number ms: Processor time of all threads during it.
loads integer loads: Expert reads that the steps asked for.
"""

AGREEMENT = """
by text -: Way of keeping the budget: eviction (our own), cgroup or balloon.
exponent number -: The stream of loads: 0 is uniform, else Zipf's exponent.
phase text -: start (a record of the first contents), warm-up or measured.
record integer -: Number of the record, layer by layer, from 0.
layer integer -: Layer of the model, from 0.
expert integer -: Expert in it, from 0.
asked_bytes integer bytes: Bytes of the expert; in rows of phase start as all that follows 0.
cold_bytes integer bytes: Bytes that were not in the page cache right before the load.
inflight_bytes integer bytes: Bytes that were on their way there.
asked_page_bytes integer bytes: Bytes of the pages that the expert touches.
cold_page_bytes integer bytes: Bytes of the cold ones among them, the least that a device reads.
device_bytes integer bytes: What the storage delivered to this thread.
"""

READS = """
pair integer -: Number of the pair, from 0: both of its rows bring the same experts into memory.
way text -: pread (the engine's readers) or mmap (page faults, as the paper's arm).
layer integer -: Layer of the model, from 0.
experts integer experts: How many experts of it were read.
cold_share number share: Share of their bytes that was cold before.
ns integer ns: Time until all were in memory.
"""

ENDURANCE = """
part text -: long (one long request, a row every few tokens) or short (a row per short request).
number integer -: Token of the long request, from 1, or number of the short one, from 0.
request_bytes integer bytes: Bytes of the request's own caches; 0 in rows of short requests.
rss_anon_bytes integer? bytes: Anonymous memory of the process; on macOS its physical footprint.
alloc_active_bytes integer? bytes: Live bytes of MLX's allocator.
alloc_cache_bytes integer? bytes: Freed buffers that the allocator keeps.
alloc_peak_bytes integer? bytes: Highest live bytes of MLX's allocator since loading.
dropped integer experts: Routed experts that took no part, so far.
pinned integer slots: Slots of the bank that a request holds.
kind integer? -: Which of the two kinds a short request is of; empty for the long one.
tokens text? -: Digest of the tokens that a short request gave; empty for the long one.
"""

LADDER = """
rung text -: Rung of the ladder, as table.md explains it.
k integer experts: Experts per token.
seed integer -: Seed of what was trained.
task text -: Kind of problem.
problem integer -: Number of the problem, from 0; the same in every rung and seed.
exact flag -: Whether the whole answer is the one that counts.
cross_entropy number? nats: Per token of the answer that counts; empty for the engine's own answers.
answer text -: What was said.
"""

QUALITY = """
benchmark text -: aime2026, humaneval, gpqa-diamond, mmlu-pro or ifbench.
arm text -: int4 (the checkpoint as it is served) or fp (its original).
k integer experts: Experts per token.
question text -: Identity of the question in both arms: its own number, or digits of its content.
category text -: Of MMLU-Pro its category, of IFBench its instructions; else empty.
score number -: From 0 to 1.
answer text -: All that was said.
prompt_tokens integer tokens: Of the question as the model read it.
answer_tokens integer tokens: Of the answer.
stop text -: end, or length where the answer was cut at the limit.
stand_in flag -: Whether the question is a synthetic stand-in.
"""

MERGE = """
adapters text -: Folder of the adapter set.
target text -: Matrix that the LoRA corrects, by its name in the checkpoint.
layer integer -: Layer of the model, from 0.
kind text -: attention, linear attention, shared expert or dense.
projection text -: Last part of the target's name.
bits integer bits: Bits of a code.
weights integer -: Weights of the matrix.
survival number? share: 1 - |U - M| / |U - B|; empty where the LoRA corrects nothing.
survival_same_grid number? share: The same, rounded to the scales and biases that were.
delta_rms number -: Root mean square of the correction.
step_median number -: Median of the groups' scales, without sign.
step_mean number -: Mean of them.
delta_over_step number -: delta_rms / step_median.
requantised_rms number -: What quantising the base again moves its weights by, root mean square.
codes_changed number share: Weights whose stored code differs after the merge.
"""

MERGE_LOGITS = """
adapters text -: Folder of the adapter set.
prompt integer -: Number of the prompt, from 0.
task text -: What it asks for, or token ids.
position integer -: Position in the sequence, from 0.
change number -: Norm of the difference of logits with the LoRA and without.
error number -: The same with the LoRA and with it merged.
survival number? share: 1 - error / change; empty where nothing changed.
"""
