# simonw's llm: a model of its list of OpenAI-compatible ones, streamed (the default) and full.
# Usage: with_llm.sh URL MODEL, with llm on the PATH.
set -eu
LLM_USER_PATH=$(mktemp -d)
export LLM_USER_PATH
trap 'rm -rf "$LLM_USER_PATH"' EXIT
printf -- '- model_id: here\n  model_name: %s\n  api_base: %s/v1\n' "$2" "$1" >"$LLM_USER_PATH/extra-openai-models.yaml"
streamed=$(llm -m here --key x -o temperature 0 -o max_tokens 8 'What is iron made from?')
full=$(llm -m here --key x -o temperature 0 -o max_tokens 8 --no-stream 'What is iron made from?')
test -n "$streamed"
test "$streamed" = "$full"
echo "llm: all as expected"
