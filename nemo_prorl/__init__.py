"""Prolonged reinforcement learning with verifiable rewards on NVIDIA's NeMo stack."""

__version__ = "0.1.0"
