#!/bin/sh
# An agent with a skill, a tool and a memory, asked with curl.
#
#     kiln serve --model MODEL --config examples/native/kiln.toml &
#     examples/native/agent.sh [URL]
#
# The agent is examples/native/agents/shopper.toml: it pins the skill `unit-price`, may call `calc_arithmetic`,
# and remembers what it hears under its own name.
set -eu
url=${1:-http://127.0.0.1:8420}

call() { # PATH [curl arguments]
    path=$1
    shift
    curl -sSN --fail-with-body ${KILN_API_KEY:+-H "authorization: Bearer $KILN_API_KEY"} "$url$path" "$@"
}

ask() { # BODY
    call /lmkit/v1/chat -H 'content-type: application/json' -d "$1"
}

# What it is to remember. The exchange is learned from when its answer is out.
ask '{
  "agent": "shopper",
  "messages": [{"role": "user", "content": "We are three at home and drink two litres of milk a day."}]
}'
echo

# Another exchange: the skill is active, what is remembered is in the system turn, sums are done by the tool.
ask '{
  "agent": "shopper",
  "request_id": "milk",
  "stream": true,
  "messages": [{"role": "user", "content": "6 litres of milk cost 5.40, and 10 litres 8.50. Which pack for a week?"}]
}'

# While it thinks, another shell may end that:
#     curl "$url/lmkit/v1/chat/skip-thinking" -H 'content-type: application/json' -d '{"request_id": "milk"}'

echo "What the agent remembers:"
call /lmkit/v1/memory/shopper
echo
