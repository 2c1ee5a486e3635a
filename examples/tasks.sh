#!/bin/sh
# Run tasks of lm_eval on a model in vLLM (or transformers). Scores and answers go to the directory
# tasks-NAME, which must not exist yet.
#
#     sh tasks.sh NAME MODEL CONTEXT [OPTION=VALUE ...]
#
# CONTEXT is the most tokens of a prompt and its answer; lm_eval cuts longer prompts at their
# beginning, and only logs it. OPTION is an option of vLLM, such as kv_cache_dtype=fp8.
#
# It was run with lm_eval 0.4.13 in transformers on a CPU; its options of vLLM follow the
# documentation of 0.32.0. docs/guide-7b.md uses it.
set -eu

# Tasks like your use, at which the base model is good
TASKS=triviaqa,squad_completion
# More options of lm_eval, such as --apply_chat_template for an Instruct model
MORE=""
LM_EVAL=.venv-vllm/bin/lm_eval
# vllm, or hf without vLLM
ENGINE=vllm

if [ $# -lt 3 ]; then
    echo "usage: sh tasks.sh NAME MODEL CONTEXT [OPTION=VALUE ...]" >&2
    exit 2
fi
name=$1 model=$2 context=$3
shift 3

if [ -e "tasks-$name" ]; then
    echo "error: tasks-$name exists: pass another NAME, or move tasks-$name away" >&2
    exit 1
fi
if ! command -v "$LM_EVAL" >/dev/null; then
    echo "error: there is no $LM_EVAL here: run this in the directory of .venv-vllm, or set LM_EVAL" >&2
    exit 1
fi
if [ "$ENGINE" = hf ]; then
    case " $*" in
        *" kv_cache_dtype="*)
            echo "error: kv_cache_dtype is an option of vLLM: leave it out with ENGINE=hf" >&2
            exit 1
            ;;
    esac
fi

# add_bos_token: each prompt begins with the start token, as in the server. dtype: FlashAttention 3,
# in which vLLM runs an FP8 cache on Hopper, cannot write float16
arguments="pretrained=$model,add_bos_token=True"
case $ENGINE in
    hf) arguments="$arguments,max_length=$context" ;;
    *) arguments="$arguments,dtype=bfloat16,max_model_len=$context,gpu_memory_utilization=0.9" ;;
esac
for option in "$@"; do
    arguments="$arguments,$option"
done

# shellcheck disable=SC2086  # MORE is several words
"$LM_EVAL" --model "$ENGINE" --model_args "$arguments" --tasks "$TASKS" --batch_size auto \
    --log_samples --output_path "tasks-$name" $MORE
