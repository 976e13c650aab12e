r"""Stock masked-LM pretraining, as in transformers' run_mlm.py, for `speed.py` and `loss_over_time.py`: chunks of fixed
size, `DataCollatorForLanguageModeling`, `RobertaForMaskedLM`, `Trainer` with its defaults but for 6% of warm-up.

    python benchmarks/stock_mlm.py TEXT.jsonl HELD_OUT.jsonl TOKENIZER CONFIG.json OUTPUT_DIR STEPS BATCH SEQ_LEN RATE \
        [EVAL_STEPS]
"""

import itertools
import sys

import datasets
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)

VALIDATION_BLOCKS = 2048  # maximum, as in presets/mlm/demonstration.yaml


def main() -> None:
    text, held_out, tokenizer_name, config_name, output_dir, steps, batch, seq_len, rate, *eval_steps = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    files, cache = {"train": text, "validation": held_out}, f"{output_dir}/cache"  # not shared with earlier runs
    splits = datasets.load_dataset("json", data_files=files, cache_dir=cache)

    def tokenize(rows):
        return tokenizer(rows["text"], return_special_tokens_mask=True)

    def group_texts(rows):
        joined = {name: list(itertools.chain.from_iterable(rows[name])) for name in rows}
        total = len(joined["input_ids"]) // int(seq_len) * int(seq_len)
        return {
            name: [ids[start : start + int(seq_len)] for start in range(0, total, int(seq_len))]
            for name, ids in joined.items()
        }

    tokenized = splits.map(tokenize, batched=True, remove_columns=["text"])
    grouped = tokenized.map(group_texts, batched=True)
    validation = grouped["validation"].select(range(min(VALIDATION_BLOCKS, len(grouped["validation"]))))
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=int(steps),
        per_device_train_batch_size=int(batch),
        per_device_eval_batch_size=int(batch),
        learning_rate=float(rate),
        warmup_steps=0.06,
        report_to="none",
        logging_steps=50,
        save_strategy="no",
        eval_strategy="steps" if eval_steps else "no",
        eval_steps=int(eval_steps[0]) if eval_steps else None,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=RobertaForMaskedLM(RobertaConfig.from_json_file(config_name)),
        args=args,
        train_dataset=grouped["train"],
        eval_dataset=validation,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
