"""The study gpu with more points: what samples and updates add to the power, and each choice.

Three local batch sizes at three rates tell samples from updates, which an LBS sweep alone cannot: a
step takes t0 + t1 LBS, so that samples and updates an hour lie on a line. Figures: as of gpu.
Hardware: one NVIDIA GPU with 80 GB. Command: `make gpu-study GPU_MINUTES=32`. Cost: half an hour,
about 0.25 kWh. Expected: as of gpu; power rises with samples an hour more than with updates an
hour; the repeats of LBS 256 differ by less than 2 %.
"""

from energynn.experiment import studies

GPU_GRID_POINTS = [
    studies.state_point("paper", 1, seconds=65),
    studies.image_point("paper", 32, steps=8),
    studies.image_point("fast", 256, compile=True),
    studies.state_point("paper", 8),
    studies.image_point(
        "fast", 128, images_per_s=2900, loader_workers=12, **studies.JPEG_FILES_POINT
    ),
    studies.state_point("paper", 4, 0.5),
    studies.state_point("paper", 1, 0.5),
    studies.image_point(
        "paper", 128, images_per_s=1300, loader_workers=12, **studies.JPEG_FILES_POINT
    ),
    studies.image_point("paper", 32, 0.6),
    studies.image_point("paper", 256, repeat=2),
    studies.image_point("paper", 256, images_per_s=2200, precision="bfloat16"),
    studies.image_point("paper", 256, sampling_period_s=0.2),
    studies.image_point("paper", 256, 0.6),
    studies.image_point("paper", 256, images_per_s=1800, channels_last=True),
    studies.state_point("paper", 2),
    studies.image_point("paper", 256, fused_optimizer=True),
    studies.image_point("paper", 96, 0.6),
    studies.image_point("fast", 512),
    studies.image_point("paper", 64),
    studies.state_point("fast", 2),
    studies.image_point("fast", 32),
    studies.state_point("fast", 8),
    studies.image_point("paper", 96, 0.3),
    studies.image_point("fast", 128),
    studies.image_point("fast", 64),
    studies.image_point("paper", 512),
]


def study(system: str = "local"):
    return studies.make_gpu_runs(studies.GPU_STUDY_POINTS + GPU_GRID_POINTS, system)
