r"""Reward plugin `math`: final answers in \boxed{}."""
