"""Real vLLM on a CPU with tiny models: `scripts/vllm_cpu.sh` makes its environment and runs this.

The suite does not collect it. Experts are held to those that `mm.Checkpoint` reads from the same
files, computed by the oracle: call by call with vLLM's own inputs, and logprobs to a model of
transformers that has such experts.
"""

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import megamoe as mm
from megamoe.formats.spec import recipe_named
from megamoe.integrations.vllm import layers

E, K, H, I, LAYERS, VOCAB = 8, 2, 256, 128, 2, 64
NEW = 8  # tokens that are generated
PROMPTS = [list(range(1, 20)), list(range(20, 60))]
OURS = {"backend": "reference"}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine in this process: calls are seen


# -- models ------------------------------------------------------------------------------------


def qwen3(folder: Path, seed: int = 7) -> Path:
    """A random BF16 model whose experts matter as much as its attention."""
    import transformers as tf

    torch.manual_seed(seed)  # of 7 few near ties among the tokens that it generates
    config = tf.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=H, intermediate_size=512, moe_intermediate_size=I,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=E, num_experts_per_tok=K, norm_topk_prob=True, max_position_embeddings=512,
        tie_word_embeddings=False, initializer_range=0.06,
    )  # fmt: skip
    model = tf.Qwen3MoeForCausalLM(config)
    for name, t in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            t.data.mul_(8.0)  # far from ties: BF16 noise of attention must not route otherwise
    model.lm_head.weight.data.mul_(0.4)
    model.bfloat16().save_pretrained(folder)
    return folder


def gpt_oss(folder: Path) -> Path:
    """A random gpt-oss with experts in MXFP4, as its checkpoints have them."""
    import transformers as tf

    torch.manual_seed(0)
    config = tf.GptOssConfig(
        vocab_size=VOCAB, hidden_size=H, intermediate_size=I, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_local_experts=E,
        num_experts_per_tok=K, layer_types=["sliding_attention", "full_attention"],
        sliding_window=128, max_position_embeddings=512, initializer_range=0.06,
    )  # fmt: skip
    tf.GptOssForCausalLM(config).bfloat16().save_pretrained(folder)
    tensors, made = load_file(folder / "model.safetensors"), {}
    for name, t in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            q = mm.quantize(t.transpose(1, 2).contiguous().float(), "mxfp4")
            made[f"{name}_blocks"] = q.data.unflatten(2, (-1, 16)).contiguous()
            made[f"{name}_scales"] = q.scale
        else:
            made[name] = t if not name.endswith("bias") else torch.randn_like(t) * 0.1
    rewrite(folder, made, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    return folder


def quantised(source: Path, folder: Path, fmt: str) -> Path:
    """The same model with experts in another format, each expert's linears apart."""
    folder.mkdir()
    made, skipped = {}, []
    for name, t in load_file(source / "model.safetensors").items():
        if ".experts." not in name:
            made[name] = t
            skipped += [name.removesuffix(".weight")] if t.ndim == 2 else []
            continue
        q = mm.quantize(t.float(), fmt)
        made[name] = q.data
        made[name + ("_scale_inv" if fmt == "fp8_128x128" else "_scale")] = q.scale
    what = {"quant_method": "mxfp4"}
    if fmt == "fp8_128x128":
        what = {"quant_method": "fp8", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128], "modules_to_not_convert": skipped}  # fmt: skip
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, made, what)
    return folder


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], what: dict[str, object]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": what}))


# -- the two sides -----------------------------------------------------------------------------


class Served(NamedTuple):
    """Greedy tokens, logprobs of the whole vocabulary at each, and every call of our experts."""

    tokens: list[list[int]]
    logprobs: Tensor
    calls: list[tuple[int, Tensor, Tensor, Tensor, Tensor]]  # layer, x, ids, weights, y


def served(
    folder: Path, ours: object, prompts: list[list[int]] = PROMPTS, num_new: int = NEW,
    then: Path | None = None, **options: object,
) -> Served:  # fmt: skip
    """What a model says.

    then  a folder whose weights it has before it says anything
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    calls = []

    def apply(layer, made, x, topk_weights, topk_ids, *over):
        y = real(layer, made, x, topk_weights, topk_ids, *over)
        number = int(layer.layer_name.split("layers.")[1].split(".")[0])
        calls.append((number, x.clone(), topk_ids.clone(), topk_weights.clone(), y.clone()))
        return y

    real, layers.apply = layers.apply, apply
    try:
        llm = LLM(
            model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
            max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=64 << 20, max_logprobs=-1,
            additional_config={} if ours is None else {"megamoe": ours}, **options,
        )  # fmt: skip
        if then is not None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(then)})
            calls.clear()  # of the profile of memory
        wanted = SamplingParams(max_tokens=num_new, temperature=0.0, detokenize=False, logprobs=-1)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        answers = llm.generate(given, wanted, use_tqdm=False)
        del llm
        cleanup_dist_env_and_memory()
    finally:
        layers.apply = real
    tokens, logprobs = [], []
    for answer in answers:
        one = answer.outputs[0]
        tokens.append(list(one.token_ids))
        rows = [[step[i].logprob for i in range(VOCAB)] for step in one.logprobs]
        logprobs.append(torch.tensor(rows, dtype=torch.float64))
    return Served(tokens, torch.stack(logprobs), calls)


def oracle(folder: Path, number: int, recipe: str):
    """The experts of a layer, read from the files and computed by the oracle."""
    checkpoint = mm.Checkpoint(folder)
    picked = checkpoint.picked(number, recipe)
    w = checkpoint.experts(number, recipe=recipe)

    def forward(x, idx, weights):
        return mm.moe(
            x.flatten(0, -2), idx, weights.float(), w, weight_at="combine", backend="reference",
            activation=picked.activation, clamp=picked.clamp,
        ).view_as(x)  # fmt: skip

    return forward


def expected(folder: Path, dense: Path, recipe: str, tokens, *, scale: float = 1.0):
    """The same logprobs by transformers, with experts that the oracle computes.

    scale  of the experts' rows; 0 leaves them out
    """
    import transformers as tf

    model = tf.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16).eval()
    for number, layer in enumerate(model.model.layers):
        experts = oracle(folder, number, recipe)
        layer.mlp.experts.forward = lambda *args, experts=experts: scale * experts(*args)
    found = []
    for prompt, more in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([prompt + more[:-1]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 :]
        found.append(logits.double().log_softmax(-1))
    return torch.stack(found)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return qwen3(tmp_path_factory.mktemp("models") / "bf16")


@pytest.fixture(scope="module")
def own(plain):
    """What vLLM's own experts say."""
    return served(plain, False)


# -- claims ------------------------------------------------------------------------------------


def test_bf16_tokens_are_those_of_vllms_own_experts(plain, own):
    ours = served(plain, OURS)
    assert not own.calls and len(ours.calls) >= LAYERS * NEW
    found = error(ours.logprobs, own.logprobs)
    print(f"bf16: within {found:.1e} of vLLM's own logprobs")
    assert 0 < found < recipe_named("bf16").tolerance
    best = own.logprobs.topk(2).values
    is_tie = (best[..., 0] - best[..., 1]) < 2e-3 * best[..., 0].abs()
    assert not is_tie.any(), "pick another seed: a tie says nothing"
    assert ours.tokens == own.tokens


@pytest.mark.parametrize(
    ("fmt", "recipe"), [("fp8_128x128", "w8a8"), ("mxfp4", "w4a16"), ("mxfp4", "w4a8_block")]
)
def test_quantised_models_answer_as_the_oracle_does(plain, tmp_path, fmt, recipe):
    folder = quantised(plain, tmp_path / fmt, fmt)
    ours = served(folder, OURS if fmt != "mxfp4" else OURS | {"mxfp4": recipe})
    held_to_the_oracle(ours.calls, folder, recipe)
    bound = recipe_named(recipe).tolerance
    found = error(ours.logprobs, expected(folder, plain, recipe, ours.tokens))
    without = error(ours.logprobs, expected(folder, plain, recipe, ours.tokens, scale=0.0))
    print(f"{recipe}: within {found:.1e} of the oracle's logprobs, {without:.1e} without experts")
    assert found < bound < without / 4


def held_to_the_oracle(calls: list, folder: Path, recipe: str) -> None:
    """Every call of every layer, bit for bit; what vLLM pads with is routed nowhere."""
    assert {call[0] for call in calls} == set(range(LAYERS))
    experts = [oracle(folder, number, recipe) for number in range(LAYERS)]
    for number, x, ids, weights, y in calls:
        ids = ids.masked_fill(~weights.isfinite(), -1)
        assert torch.equal(y, experts[number](x, ids, weights.nan_to_num(0, 0)))


# The prompts and new tokens of each rank: the second one waits idle, with batches of padding.
RANKS = ((PROMPTS[:1], NEW), (PROMPTS[1:], NEW - 3))


def test_two_ranks_exchange_tokens_by_our_own_communication(plain, own, tmp_path):
    """vLLM's own exchange is not built for a CPU; the tokens are those of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank, (prompts, num_new) in enumerate(RANKS):
        how = {"folder": str(plain), "prompts": prompts, "num_new": num_new}
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        env = {key: str(value) for key, value in where.items()} | {"MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", "tests.integrations.vllm_server", json.dumps(how),
                   str(tmp_path / f"{rank}.pt")]  # fmt: skip
        ranks.append(subprocess.Popen(command, env=os.environ | env))
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, num_new) in enumerate(RANKS):
        tokens, calls = torch.load(tmp_path / f"{rank}.pt")
        assert tokens == [own.tokens[rank][:num_new]]
        assert len(calls) == LAYERS * NEW  # as many on both
        held_to_the_oracle(calls, plain, "bf16")


def one_rank(how: dict, out: str) -> None:
    """One of the processes above."""
    folder = Path(how.pop("folder"))
    done = served(
        folder, OURS | {"exchange": "megamoe"}, data_parallel_size=2, enable_expert_parallel=True,
        distributed_executor_backend="external_launcher", **how,
    )  # fmt: skip
    torch.save((done.tokens, done.calls), out)


def test_weights_that_are_reloaded_go_into_the_same_layers(plain, tmp_path):
    """As reinforcement learning does: other weights, in the format of the checkpoint."""
    first = quantised(plain, tmp_path / "first", "mxfp4")
    other = quantised(qwen3(tmp_path / "plain", seed=3), tmp_path / "other", "mxfp4")
    ours = served(first, OURS, then=other)
    held_to_the_oracle(ours.calls, other, "w4a16")


def test_gpt_oss_has_its_gate_biases_and_order_of_rows(tmp_path):
    folder = gpt_oss(tmp_path / "gpt-oss")
    held_to_the_oracle(served(folder, OURS).calls, folder, "w4a16")


def test_what_we_do_not_take_still_serves_and_says_why_once(plain):
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("vllm.megamoe")
    log.addHandler(listener)
    own = served(plain, None)  # no backend asked for, and no Hopper here
    log.removeHandler(listener)
    assert not own.calls and all(len(ids) == NEW for ids in own.tokens)
    assert len(said) == 1 and "needs an H100" in said[0]


def test_vllms_own_switch_turns_the_plugin_off():
    """In a process of its own: plugins are loaded once."""
    code = "from vllm.plugins import load_general_plugins as load; load()\n"
    code += "from vllm.model_executor.custom_op import op_registry_oot as o; print(sorted(o))"
    seen = {}
    for plugins in ("megamoe", ""):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=os.environ | {"VLLM_PLUGINS": plugins},
        )  # fmt: skip
        seen[plugins] = done.stdout.strip().splitlines()[-1]
    assert seen == {"megamoe": "['GptOssRoutedExperts', 'RoutedExperts']", "": "[]"}


if __name__ == "__main__":
    one_rank(json.loads(sys.argv[1]), sys.argv[2])
