r"""A plain form of chemical formulas and equations, in which `H_2O`, `\ce{H2O}`, `\mathrm{H_2O}`, H₂O are equal."""

import re

_ELEMENTS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb "
    "Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au "
    "Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr D"
)
_ELEMENT = "|".join(sorted(_ELEMENTS.split(), key=len, reverse=True))
_FORMULA = re.compile(
    rf"(?:\d*(?:(?:{_ELEMENT}|[()\[\]])\d*)+(?:\^?\d*[+-])?(?:\((?:aq|s|l|g)\))?(?:[.+]|->|<=>)?)+", re.ASCII
)
_WORDS = frozenset({"no", "yes", "in", "as", "at", "i", "he", "be"})
_SMALL = str.maketrans(
    {chr(0x2080 + digit): str(digit) for digit in range(10)}
    | {"\u207a": "+", "\u207b": "-", "\u00b2": "2", "\u00b3": "3", "\u2074": "4", "\u2192": "->", "\u21cc": "<=>"}
    | {"\u2212": "-", "\u00b7": ".", "\u2022": ".", "\u22c5": "."}
)
MAX_FORMULA_CHARS = 300


def formula(text: str) -> str | None:
    r"""Return a chemical formula or equation in one plain form; None for anything else."""
    if len(text) > MAX_FORMULA_CHARS:
        return None
    text = text.translate(_SMALL)
    text = re.sub(
        r"\\(?:ce|text|mathrm|rm|mathbf|textbf|mathsf)(?![A-Za-z])|\\(?:left|right)(?![A-Za-z])|[{}$_]", "", text
    )
    text = re.sub(r"\\(?:long)?rightarrow|\\to(?![A-Za-z])|\\longrightarrow", "->", text)
    text = re.sub(r"\\(?:rightleftharpoons|leftrightarrow)", "<=>", text)
    text = re.sub(r"\\(?:cdot|bullet|ast)(?![A-Za-z])|\*", ".", text)
    text = re.sub(r"\\[,;:! ]|\s|~", "", text).rstrip(".")
    text = re.sub(r"\((?:aq|s|l|g)\)", "", text)  # states of matter do not count
    if text.casefold() in _WORDS or not _FORMULA.fullmatch(text):
        return None
    return text.replace("^", "")


def is_plain_symbol(text: str) -> bool:
    """Return whether a formula is a single element symbol, which may also be a variable in mathematics."""
    return re.fullmatch(r"[A-Z][a-z]?", text) is not None
