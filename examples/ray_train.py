"""Ray Train: digits.py in the processes of a TorchTrainer, which starts them again when one is lost.

python examples/ray_train.py
"""

from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from launch import train_loop

if __name__ == "__main__":
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "name": f"{Path(__file__).resolve().with_name('digits.py')}:digits",
            "settings": "train.steps=50 train.checkpoint_every=10 tracking.wandb=disabled",
        },
        scaling_config=ScalingConfig(num_workers=2),  # K x R
        run_config=RunConfig(
            name="digits",  # another name is another run; this one is resumed
            storage_path=str(Path("ray-train").resolve()),  # a folder that all nodes share
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    loss, accuracy = result.metrics["loss_last"], result.metrics["valid_accuracy"]
    print(f"loss {loss:.4f}, accuracy on held-out digits {accuracy:.4f}; {result.checkpoint.path}")
