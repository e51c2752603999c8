"""Installs what Lineage needs. The code itself runs from the checkout: `pip install -e .`."""

from setuptools import setup

setup(
    name="lineage",
    version="0.1.0",
    description="The Transformer and its family in JAX and Flax: one training loop, exact models, trusted metrics.",
    python_requires=">=3.11",
    packages=["configs", "data", "metrics", "models", "models.convert", "models.layers", "train"],
    py_modules=["launch"],
    install_requires=[
        "jax>=0.10",
        "flax>=0.12",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12",
        "ml-collections>=1.1",
        "grain>=0.2.18",
        "tensorflow-datasets>=4.9.10",
        "array_record>=0.8",
        "tokenizers>=0.22",
        "safetensors>=0.6",
        "jaxtyping>=0.3",
        "numpy>=2.0",
        "scipy>=1.14",
        "scikit-learn>=1.5",
        "pillow>=11",
        "absl-py>=2.1",
        "etils>=1.12",
        "matplotlib>=3.9",
        "tensorboardX>=2.6.4",
        "babel>=2.16",
        "sacrebleu>=2.5",
        "nltk>=3.9",
        "pot>=0.9.5",
        "rich>=13",
        "flatbuffers>=24.3",  # jax.export writes programs with it
    ],
    extras_require={
        "cuda13": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        # Preparing a TFDS data set; reading a prepared one needs none of it.
        "prepare": ["tensorflow-cpu", "importlib_resources"],
        "search": ["optuna>=4.2"],  # --sweep=optuna
        "cluster": ["submitit>=1.5"],  # --cluster=slurm
        "test": [
            "optuna>=4.2",
            "submitit>=1.5",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "seqeval>=1.2.2",
            "beartype>=0.21",
            "ruff>=0.12",
            "pycocotools>=2.0.10",
            "rouge-score>=0.1.2",
            "bert-score>=0.3.13",
            "torch==2.13.0",
            "transformers>=5.20,<6",
        ],
    },
)
