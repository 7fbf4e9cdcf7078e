#!/usr/bin/env bash
# Upload a LoRA adapter, ask with it, compose, merge, download and delete it.
#
#     kiln serve --adapter-dir adapters &
#     examples/adapters.sh [URL] [ADAPTER_FOLDER]
#
# Needs curl and tar. With API keys, KILN_API_KEY must be one of scope admin.
set -euo pipefail

url="${1:-http://127.0.0.1:8420}"
folder="${2:-$(dirname "$0")/../models/tiny-reasoner-cheerful-lora}"
name="example-$$"
work="$(mktemp -d)"

call() { # METHOD PATH [curl arguments]: the answer's body; an error's body too, and a failure
    local method="$1" path="$2"
    shift 2
    curl --silent --show-error --fail-with-body --request "$method" \
        ${KILN_API_KEY:+--header "authorization: Bearer $KILN_API_KEY"} "$url$path" "$@"
}

post() { # PATH BODY
    call POST "$1" --header 'content-type: application/json' --data "$2"
}

ask() { # FIELDS: the answer to one problem, with more fields in the request
    post /v1/chat/completions \
        "{\"messages\": [{\"role\": \"user\", \"content\": \"3+8-2+7=?\"}], \"temperature\": 0, $1}" |
        sed 's/.*"content":"\([^"]*\)".*/\1/'
    echo
}

cleanup() {
    rm -rf "$work"
    for left in "$name" "$name-merged"; do
        call DELETE "/v1/adapters/$left" >/dev/null 2>&1 || true
    done
}
trap cleanup EXIT

echo "1. upload"
tar -czf "$work/up.tar.gz" -C "$(dirname "$folder")" "$(basename "$folder")"
call POST /v1/adapters/upload --form "name=$name" --form "archive=@$work/up.tar.gz"
echo

echo "2. ask the base model, then the adapter"
ask '"adapter": null'
ask "\"adapter\": \"$name\""

echo "3. compose: half and half is the whole"
half="{\"name\": \"$name\", \"scale\": 0.5}"
ask "\"adapters\": [$half, $half]"

echo "4. merge into a new adapter"
post /v1/adapters/merge "{\"name\": \"$name-merged\", \"method\": \"concat\", \"adapters\": [{\"name\": \"$name\"}]}"
echo
ask "\"adapter\": \"$name-merged\""

echo "5. download"
call GET "/v1/adapters/$name/download" --output "$work/down.tar.gz"
tar -tzf "$work/down.tar.gz"

echo "6. delete"
call DELETE "/v1/adapters/$name-merged"
echo
call DELETE "/v1/adapters/$name"
echo
