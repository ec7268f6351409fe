"""The table of docs/deepspeed.md, from infinity/cli/deepspeed/keys.yaml. tests/cli/test_convert.py compares both."""

from __future__ import annotations

from infinity.cli.deepspeed.keys import DEEPSPEED, KEYS, LOST, DeepSpeedKey, KeyTreatment

PARTS = (
    ((KeyTreatment.MAPPED,), "Keys that become keys of the swap config", "key of the swap config | how"),
    (
        (KeyTreatment.SCRIPT,),
        "Keys that belong to the script, or to `infinity finetune`",
        "`infinity finetune` | `TrainingArguments` | what to know",
    ),
    (LOST, "Keys without a counterpart", "what is lost | what happens instead"),
    ((KeyTreatment.NOT_NEEDED,), "Keys that are not needed", "why"),
)


def key_tables() -> str:
    """Return the table of keys as Markdown, with a part for each fate. The page has it between two comments."""
    parts = []
    for fates, title, header in PARTS:
        keys = [KEYS[name] for name in DEEPSPEED if KEYS[name].fate in fates]
        rows = [f"### {title}", "", f"| DeepSpeed | {header} |", "|---" * (header.count("|") + 2) + "|"]
        if KeyTreatment.NOT_NEEDED in fates:
            groups: dict[str, list[str]] = {}
            for key in keys:
                groups.setdefault(key.says, []).append(_named(key))
            rows += [f"| {', '.join(names)} | {says} |" for says, names in groups.items()]
        else:
            rows += [_row(key) for key in keys]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _row(key: DeepSpeedKey) -> str:
    if key.fate is KeyTreatment.MAPPED:
        return f"| {_named(key)} | {_code(key.to)} | {key.says} |"
    if key.fate in LOST:
        return f"| {_named(key)} | {key.fate.value.partition(', ')[2]} | {key.says} |"
    return f"| {_named(key)} | {_code(key.to)} | {_code(key.trainer)} | {key.says} |"


def _named(key: DeepSpeedKey) -> str:
    return f"`{key.name}`" + (f" (Accelerate: `deepspeed_config.{key.accelerate}`)" if key.accelerate else "")


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ")) if names else ""
