r"""Reward plugin `stem`: science answers in \boxed{}."""
