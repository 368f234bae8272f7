"""Generates rollouts with a real vLLM that follows the weights of a policy. Run it beside policy.py."""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

import rankless
from rankless.vllm.following import EngineFollower


def main(folder: Path, versions: int) -> None:
    """Generate for each version, as soon as it is published."""
    rankless.wait_for_weights(folder / "weights")
    engine = LLM(
        str(folder / "model"),
        load_format="rankless",
        model_loader_extra_config={"path": str(folder / "weights")},  # it begins with the newest version
        weight_transfer_config=WeightTransferConfig(backend="rankless"),
        worker_extension_cls="rankless.vllm.weight_transfer.FollowingWorker",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        dtype="float16",
    )
    follower = EngineFollower(engine, str(folder / "weights"))
    prompt, parameters = [1, 5, 9], SamplingParams(n=32, max_tokens=12, min_tokens=12, detokenize=False, seed=0)
    while follower.version_number < versions:
        rankless.wait_for_weights(folder / "weights", after=follower.version_number)
        number = follower.update()
        (request,) = engine.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        rollouts = [
            {"prompt": prompt, "tokens": list(output.token_ids), "reward": reward_of(output.token_ids)}
            for output in request.outputs
        ]
        draft = folder / "rollouts.draft"
        draft.write_text(json.dumps(rollouts))
        draft.rename(folder / f"rollouts_{number}.json")


def reward_of(tokens: list[int]) -> float:
    """Return the share of tokens that are even: what the policy is to learn."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
