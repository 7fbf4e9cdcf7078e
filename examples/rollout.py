"""Make one rollout with provenance, score its tokens again, and compare.

    python examples/rollout.py [URL]

The policy is sampled at temperature 1 without truncation, so the log-probability that each token was
drawn with and its score must agree. Needs a running server and httpx.
"""

from __future__ import annotations

import sys
from typing import Any

import httpx

URL = "http://127.0.0.1:8420"
TOLERANCE = 1e-6


def main(url: str = URL) -> int:
    with httpx.Client(base_url=url, timeout=120) as client:
        rollout = make_rollout(client)
        ids, prompt = rollout["input_token_ids"], rollout["prompt_token_count"]
        scores = score(client, ids)[prompt:]
    print(f"model   {rollout['behavior_policy']['served_model_id']}, seed {rollout['seed']}")
    print(f"prompt  {prompt} tokens; completion {len(scores)}")
    print(f"{'index':>6}  {'token':<14}{'source':<9}{'drawn':>12}{'scored':>12}")
    largest = 0.0
    for action, entry in zip(rollout["action_tokens"], scores, strict=True):
        # The token that stands in the prompt is always among the scored ones.
        found = entry[str(action["token_id"])]
        drawn = action["behavior_logprob"]
        if drawn is not None:
            largest = max(largest, abs(drawn - found["logprob"]))
        shown = "-" if drawn is None else f"{drawn:.6f}"
        token = repr(found["decoded_token"])
        print(
            f"{action['sequence_index']:>6}  {token:<14}{action['source']:<9}{shown:>12}"
            f"{found['logprob']:>12.6f}"
        )
    print(f"largest difference: {largest:.3e}")
    return 0 if largest <= TOLERANCE else 1


def make_rollout(client: httpx.Client) -> dict[str, Any]:
    """The record of one completion whose thinking is cut after 12 tokens."""
    body = {
        "messages": [{"role": "user", "content": "3+8-2+7=?"}],
        "temperature": 1,
        "top_p": 1,
        "top_k": 0,
        "max_tokens": 64,
        "thinking_budget_tokens": 12,
        "seed": 7,
        "rollout_provenance": True,
    }
    record: dict[str, Any] = post(client, "/v1/chat/completions", body)["choices"][0]["rollout_provenance"]
    return record


def score(client: httpx.Client, ids: list[int]) -> list[dict[str, Any]]:
    """For every token the scores at its place, keyed by token id; nothing for the first."""
    answer = post(client, "/v1/completions", {"prompt": ids, "prompt_logprobs": 0})
    entries: list[dict[str, Any]] = answer["choices"][0]["prompt_logprobs"]
    return entries


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    if response.is_error:
        raise SystemExit(f"{path} answered {response.status_code}: {response.text}")
    answer: dict[str, Any] = response.json()
    return answer


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:2]))
    except httpx.ConnectError as error:
        sys.exit(f"no server answers ({error}); start one with `kiln serve`, or give its URL")
