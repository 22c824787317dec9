# lm-eval's local-completions with the server's own tokenizer: a task of four easy questions.
# Usage: with_lm_eval.sh URL MODEL, with lm-eval on the PATH.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/capitals.jsonl" <<'DATA'
{"question": "The capital of France is", "choices": [" Paris", " Iron", " Oxygen"], "answer": 0}
{"question": "The opposite of hot is", "choices": [" Tuesday", " cold", " green"], "answer": 1}
{"question": "Water is made of hydrogen and", "choices": [" gold", " paper", " oxygen"], "answer": 2}
{"question": "The sun rises in the", "choices": [" east", " pocket", " kettle"], "answer": 0}
DATA
cat >"$folder/capitals.yaml" <<DATA
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {test: $folder/capitals.jsonl}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
DATA
HF_HUB_OFFLINE=1 HF_HOME="$folder/cache" OPENAI_API_KEY=x lm-eval run --model local-completions \
  --model_args "base_url=$1/v1/completions,model=$2,num_concurrent=2,max_retries=1" \
  --tasks capitals --include_path "$folder" >"$folder/out" 2>&1 || { cat "$folder/out"; exit 1; }
score=$(grep -E 'capitals.*acc' "$folder/out")
grep -Eq 'acc.*[|] *(1|0\.75)[|0. ]' "$folder/out" || { cat "$folder/out"; exit 1; }
echo "lm-eval: all as expected"
