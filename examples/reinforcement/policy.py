"""Trains a policy on the rollouts of an engine that follows its weights.

Run it next to rollouts.py, with a new folder and the number of versions:

    mkdir loop
    torchrun --nproc-per-node 2 policy.py loop 20 &
    python rollouts.py loop 20

With GPUs, give each program its own by CUDA_VISIBLE_DEVICES.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import rankless

folder, versions = Path(sys.argv[1]), int(sys.argv[2])
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
if (folder / "weights").exists():
    raise SystemExit(f"{folder / 'weights'} has the versions of an earlier run: pass a new folder")
dist.barrier()
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)
policy = LlamaForCausalLM(config).to(device)
if rank == 0:
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "model")
for layer in policy.model.layers:
    fully_shard(layer)
fully_shard(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)


def wait_for_rollouts(number: int) -> list[dict]:
    """Return what the engine has generated with a version: lists of tokens and their rewards."""
    rollouts = [None]
    if rank == 0:
        path = folder / f"rollouts_{number}.json"
        while not path.exists():
            time.sleep(0.05)
        rollouts = [json.loads(path.read_text())]
    dist.broadcast_object_list(rollouts)
    return rollouts[0]


# Float16, because the kernels of vLLM for processors may lack bfloat16. On a GPU publish bfloat16.
with rankless.WeightPublisher(folder / "weights", dtype="float16", anchor_every=10) as publisher:
    for step in range(versions):
        version = publisher.publish(policy, step=step).wait()
        rollouts = wait_for_rollouts(version.number)
        rewards = torch.tensor([rollout["reward"] for rollout in rollouts], device=device)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        tokens = torch.tensor([rollout["prompt"] + rollout["tokens"] for rollout in rollouts], device=device)
        mine = slice(rank, None, size)
        logits = policy(tokens[mine, :-1]).logits
        log_probabilities = torch.log_softmax(logits, -1).gather(-1, tokens[mine, 1:, None]).squeeze(-1)
        generated = log_probabilities[:, len(rollouts[0]["prompt"]) - 1 :].sum(-1)
        loss = -(advantages[mine] * generated).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            share = version.written_bytes / version.nbytes
            print(f"version {version.number}: reward {rewards.mean():.2f}, wrote {share:.0%} of the model", flush=True)
dist.destroy_process_group()
