"""The cases of the lane by name: a function of ``tests.lane.run`` and its arguments. Imports nothing of the product."""

SCHEDULES = {
    "fill_drain": ("fill_drain", 1, 1),
    "fill_drain without remat": ("fill_drain", 2**30, 1),
    "1f1b": ("1f1b", 1, 1),
    "interleaved": ("interleaved", 1, 2),
    "zero_bubble": ("zero_bubble", 2**30, 1),
    "zero_bubble with two cells": ("zero_bubble", 1, 2),
    "csv": ("csv", 1, 1, ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")),
}
"""Schedule, live graphs, virtual stages and rows of a ``ScheduleConfig``."""

EXPERIMENTS = ("t12_400m", "transformer_2", "amoebanet_fashion")
OTHER_PEOPLES = ("resnet_18", "gpt2", "llama", "lstm_stack", "u_net", "frozen", "two_inputs")
EXAMPLES = ("digits.py:digits", "vision_transformer.py:fashion", "language_model.py:text", "finetune_llama.py:llama")
PRECISIONS = ("fp32", "bf16")

CASES = {
    **{f"toy, {name}": ("every_stage", {"work": "toy", "schedule": name}) for name in SCHEDULES},
    "toy, two steps": ("every_stage", {"work": "toy", "steps": 2}),
    "toy, middle of three stages": ("one_stage", {"work": "toy", "schedule": "1f1b", "stages": 3, "stage": 1}),
    "toy, zero_bubble in bf16": ("every_stage", {"work": "toy", "schedule": "zero_bubble", "precision": "bf16"}),
    "toy, two replicas with ZeRO": ("every_stage", {"work": "toy", "schedule": "zero_bubble", "replicas": 2}),
    "toy, Adafactor": ("one_stage", {"work": "toy", "optimizer": "adafactor"}),
    "toy, RMSProp": ("one_stage", {"work": "toy", "optimizer": "rmsprop"}),
    "toy, statistics and trace": ("recorded", {}),
    "checkpoint": ("checkpoint", {"replicas": 1}),
    "checkpoint of two replicas with ZeRO": ("checkpoint", {"replicas": 2}),
    "toy, the second replica with ZeRO": ("every_stage", {"work": "toy", "replicas": 2, "replica": 1}),
    "draws": ("every_stage", {"work": "draws"}),
    **{f"chunked loss in {name}": ("one_stage", {"work": "chunked_text", "precision": name}) for name in PRECISIONS},
    "weighted classes": ("one_stage", {"work": "weighted"}),
    "BatchNorm, two replicas": ("one_stage", {"work": "weighted", "replicas": 2}),
    "frozen layers fill a stage": ("every_stage", {"work": ("other_peoples", "frozen")}),
    **{
        f"skips over a stage, {schedule}, stage {stage}": (
            "one_stage",
            {"work": ("other_peoples", "u_net"), "schedule": schedule, "stages": 3, "stage": stage},
        )
        for schedule in ("1f1b", "interleaved", "zero_bubble")
        for stage in range(3)
    },
    "decoding": ("decode", {}),
    **{
        f"{name} in {precision}": ("every_stage", {"work": ("experiment", name), "precision": precision})
        for name in EXPERIMENTS
        for precision in PRECISIONS
    },
    **{
        f"{name} in {precision}": ("one_stage", {"work": ("other_peoples", name), "precision": precision})
        for name in OTHER_PEOPLES
        for precision in PRECISIONS
    },
    **{name: ("one_stage", {"work": ("example", name), "precision": "bf16"}) for name in EXAMPLES},
}
