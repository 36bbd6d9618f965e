"""`--dump-step`: loss and every gradient of a TP=2 step, recomputed with plain transformers and
autograd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import model, train
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def loss_by_hand(policy: torch.nn.Module, batch: dict[str, Tensor], step: dict) -> Tensor:
    """STARE's loss as the paper states it, on policy: -(1/N) sum of w A p / p_old over all response
    tokens."""
    log_probs, advantages, start = [], [], 0
    sizes = zip(batch["prompt_lengths"].tolist(), batch["response_lengths"].tolist(), strict=True)
    for sample, (prompt, response) in enumerate(sizes):
        tokens = batch["tokens"][start : start + prompt + response]
        start += prompt + response
        logits = policy(tokens[None]).logits[0, prompt - 1 : -1] / step["temperature"]
        log_probs.append(logits.log_softmax(-1).gather(1, tokens[prompt:, None]).squeeze(1))
        advantages.append(advantage_by_hand(batch, sample).expand(response))
    log_prob, advantage = torch.cat(log_probs), torch.cat(advantages)
    weight = weights_by_hand(log_prob.detach(), advantage, step["algorithm"])
    ratio = (log_prob - log_prob.detach()).exp()
    return -(weight * advantage * ratio).mean()


def advantage_by_hand(batch: dict[str, Tensor], sample: int) -> Tensor:
    rewards = batch["rewards"][batch["groups"] == batch["groups"][sample]]
    return ((batch["rewards"][sample] - rewards.mean()) / (rewards.std() + 1e-6)).float()


def weights_by_hand(log_prob: Tensor, advantage: Tensor, algorithm: dict) -> Tensor:
    """The gate is open in this run (entropy_target far above), so L+ and L- are weighted."""
    weight = torch.ones_like(log_prob)
    for sign, factor in ((1, algorithm["amplify"]), (-1, algorithm["attenuate"])):
        candidates = (sign * advantage > 0).nonzero().squeeze(1)
        k = int(len(candidates) * 0.1 + 0.999999)
        weight[candidates[log_prob[candidates].argsort(stable=True)[:k]]] = factor
    return weight


@pytest.mark.wide
@pytest.mark.distributed
def test_loss_and_gradients_recomputed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = train(
        model(),
        f"run.dir={run_dir}",
        "algorithm.entropy_target=5",
        "--dump-step",
        "1",
        cwd=tmp_path,
        **{"run.steps": 1},
    )
    assert done.returncode == 0, done.stderr
    dump = run_dir / "dump_step_1"
    step = json.loads((dump / "step.json").read_text())
    batch, weights = load_file(dump / "batch.safetensors"), load_file(dump / "weights.safetensors")
    gradients = load_file(dump / "gradients.safetensors")

    policy = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(step["model"]), dtype=torch.float32
    )
    assert not policy.load_state_dict(weights, strict=False).unexpected_keys
    loss = loss_by_hand(policy, batch, step)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(step["loss"], abs=1e-5)
    want = {name: p.grad for name, p in policy.named_parameters()}
    assert gradients.keys() == want.keys()
    largest = max(float(g.abs().max()) for g in want.values())
    for name, gradient in want.items():
        assert float((gradients[name] - gradient).abs().max()) <= 1e-5 * max(1.0, largest), name
    assert largest > 1e-3  # the step taught something, so the comparison means something
