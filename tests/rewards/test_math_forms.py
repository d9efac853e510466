r"""The math plugin: one answer in the many forms that models write, and what must not pass for it.

None of the answers is taken from a contest.
"""

# ruff: noqa: RUF001 - some answers have signs that look like others

import time

import pytest
from prorl_reward_math.doubts import is_huge
from prorl_reward_math.forms import choice, listed
from prorl_reward_math.plugin import MathReward
from prorl_reward_math.units import power_of_ten, read_unit, same_unit, split_unit

from tests.rewards.judging import judged, score

# Each truth with answers that are right, then answers that are near and wrong.
CASES: list[tuple[str, list[str], list[str]]] = [
    (
        "18",
        ["\\$18.00", "18 eggs", "\\mathbf{18}", "\\boxed{18}", "n = 18", "18\\checkmark"],
        ["-18", "18.5", "1.8", "180", "18 \\text{ or } 19", "18, 19", "18!", "18\\text{ or more}"],
    ),
    ("12345", ["12,345", "12{,}345", "12\\,345", "12 345", "12,\\!345"], ["12.345", "1 2345", "12 3 45"]),
    (
        "12",
        ["12\\ \\text{units}"],
        ["1 2", "1,2", "\\neq 12", "x \\ge 12", "13 \\text{ (not } 12)", "13 (or 12)", "12 = 13", "12\\pm 1",
         "\\{12,13\\}", "\\text{not } 12"],
    ),
    ("2\\frac{5}{9}", ["\\frac{23}{9}", "2\\frac59"], ["\\frac{25}{9}", "2.55"]),
    (
        "\\frac{5}{11}",
        ["5/11", "\\dfrac5{11}", "\\frac{10}{22}", "\\frac{5}{11} \\approx 0.4545",
         "p = \\tfrac{5}{11}", "0.454545"],
        ["0.45", "0.4546", "\\frac{11}{5}", "-\\frac{5}{11}", "511", "\\frac{5}{12}"],
    ),
    ("35\\%", ["35", "0.35", "\\frac{7}{20}", "35 \\text{ percent}"], ["0.035", "3500", "53\\%"]),
    ("\\frac{51}{8}", ["6\\frac{3}{8}"], ["\\neq \\frac{51}{8}", "\\text{not } \\frac{51}{8}"]),
    ("(\\frac{1}{4}, 3)", ["(0.25, 3)"], ["\\neq (\\frac{1}{4}, 3)"]),
    ("\\{\\frac{1}{4}, 3\\}", ["3, 0.25"], ["\\neq \\frac{1}{4}, 3", "\\neq \\{\\frac{1}{4}, 3\\}"]),
    ("-7./4", ["-\\frac{7}{4}", "-1.75"], ["\\frac{7}{4}"]),
    ("6.5e23", ["6.5 \\times 10^{23}", "6.5\\cdot10^{23}\\text{ kg}"], ["6.5 \\times 10^{22}", "6.5"]),
    ("1e-6", ["10^{-6}", "0.000001"], ["10^{-7}", "0", "3e-6"]),
    ("4.1e-11", ["4.1 \\times 10^{-11}"], ["1.4 \\times 10^{-11}", "0"]),
    (
        "(4,9)",
        ["\\left(4, 9\\right)", "(x,y)=(4,9)", "x=4, y=9", "4 < x < 9"],
        ["(9,4)", "[4,9]", "(4,9]", "\\{4,9\\}", "(4,9,1)", "x=9, y=4", "4 \\le x < 9"],
    ),
    ("[6,+\\infty)", ["[6,\\infty)", "x \\ge 6", "x \\geqslant 6", "6 \\le x"], ["(6,\\infty)", "x > 6", "x \\le 6"]),
    ("\\{x|-3\\leq x < 8\\}", ["[-3,8)", "\\{x : -3 \\le x < 8\\}", "-3 \\le x < 8"], ["(-3,8)", "[-3,8]"]),
    ("(-\\infty,-4] \\cup(5, \\infty)", ["(5,\\infty)\\cup(-\\infty,-4]"], ["x < -4", "(-\\infty,-4]"]),
    ("(-\\infty,\\infty)", ["\\mathbb{R}"], ["[0,\\infty)", "\\mathbb{Z}"]),
    (
        "8, -8",
        ["\\pm 8", "x = \\pm 8", "-8 \\text{ and } 8", "x=8 \\text{ or } x=-8", "\\{8,-8\\}"],
        ["8", "-8", "8, 8", "8, -8, 0"],
    ),
    ("$3$ or $-5$ or $\\frac{1}{4}$", ["-5, \\frac14, 3", "0.25, 3, -5"], ["3, -5", "3, -5, 4"]),
    ("(1,7), (2,5)", ["(2,5), (1,7)", "\\{(1,7),(2,5)\\}", "(1,7) \\text{ and } (2,5)"], ["(7,1), (2,5)", "(1,7)"]),
    ("\\{2,4,9\\}", ["\\{9, 2, 4\\}", "2, 4, 9"], ["\\{2,4\\}", "\\{2,4,9,1\\}", "(2,4,9)"]),
    ("x=-3,11", ["11, -3", "x=11 \\text{ or } x=-3"], ["-3", "3, 11"]),
    ("f(x)=4x, f(x)=-4x", ["4x, -4x", "f(x)=-4x \\text{ and } f(x)=4x"], ["f(x)=4x", "g(x)=4x, g(x)=-4x"]),
    ("f(n)=n, g(n)=2", ["g(n)=2, f(n)=n"], ["f(n)=2, g(n)=n"]),
    ("h(t)=6t+12", ["6t+12", "h(t) = 6(t+2)"], ["6t-12", "h(t)=6t"]),
    ("y=-3x+8", ["8-3x", "3x+y=8", "y = -3x+8"], ["y=3x+8", "x=-3y+8"]),
    ("t^2-t+C", ["-t + t^2 + C"], ["t^2-t", "t^2+t+C"]),
    ("-4+4\\sqrt{5} i", ["-4+4i\\sqrt{5}", "4\\sqrt{5}i-4"], ["-4-4\\sqrt{5}i", "4-4\\sqrt{5}i"]),
    (
        "np.arcsin(5/7)",
        ["\\arcsin(5/7)", "\\sin^{-1}\\left(\\frac{5}{7}\\right)"],
        ["\\arccos(5/7)", "\\arcsin(7/5)"],
    ),
    ("\\frac{1}{\\sqrt{3}}c", ["\\frac{c}{\\sqrt{3}}"], ["\\frac{1}{\\sqrt{3}}", "\\frac{1}{\\sqrt{3}}C"]),
    (
        "\\begin{pmatrix} 5 & 1 \\\\ 0 & 7 \\end{pmatrix}",
        ["\\begin{bmatrix}5&1\\\\0&7\\end{bmatrix}"],
        ["\\begin{pmatrix} 5 & 0 \\\\ 1 & 7 \\end{pmatrix}"],
    ),
    (
        "30 $cm^{2}$",
        ["30", "30\\text{ cm}^2"],
        ["30 \\text{ m}^2", "30\\text{ cm}", "30 \\text{ cm}^3"],
    ),
    ("$80\\pi\\;m^{2}$", ["80\\pi", "80\\pi \\text{ m}^2"], ["80", "80\\pi \\text{ m}^3"]),
    ("24 \\mathrm{~min}", ["24", "24 \\text{ minutes}"], ["24\\text{ h}", "25", "24\\text{ s}"]),
    ("35^\\circ", ["35", "35 \\text{ degrees}"], ["35 \\text{ radians}", "53^\\circ"]),
    ("2:40 pm", ["2:40 \\text{ PM}", "2:40\\text{ p.m.}", "2:40 p.m."], ["2:40 am", "2:45 pm", "2:40 \\text{ a.m.}"]),
    ("\\text{2:40 PM}", ["2:40 \\text{ PM}"], ["2:40 \\text{ AM}"]),
    ("5", ["x=5", "5 \\text{ units}"], ["5 thousand", "5\\text{ squared}", "5\\pi", "5 \\vee 6"]),
    ("312_7", ["312_{7}", "312"], ["313_7"]),
    (
        "C",
        ["(C)", "\\text{C}", "\\textbf{(C) } 12", "C. 12", "\\text{(C) 12}"],
        ["D", "(D)", "C, D", "C \\text{ or } D", "A, B, C", "c"],
    ),
    ("(b)", ["b", "B", "\\text{(B)}"], ["a", "(c)"]),
    ("$36$,$512$", ["36, 512", "512, 36"], ["36512", "36,513"]),
    ("35^\\circ, 125^\\circ", ["35^\\circ,125^\\circ", "125, 35"], ["35125", "35^\\circ, 126^\\circ"]),
    ("2 2/5", ["12/5", "2.4", "2\\frac{2}{5}", "2  2/5"], ["4/5", "0.8", "2 3/5", "22/5"]),
    ("12 1/2 %", ["12.5\\%", "12.5 %", "12\\frac12\\%", "12.5", "25/2 %", "0.125"], ["12 %", "1.25", "1250"]),
    ("33 1/3 %", ["33\\frac13\\%", "\\frac{100}{3}\\%", "1/3"], ["33 %", "34 1/3 %"]),
    ("12.5%", ["12\\frac12\\%", "25/2 %", "1/8"], ["12\\frac13\\%"]),
    ("\\frac{1}{8}", ["12 1/2 %", "12.5\\%"], ["12 %"]),
    ("5 €", ["5", "€5", "€5.00", "5\\,€", "5 euros"], ["6 €", "5 £", "£5", "\\$5", "$5", "5\\$", "5\\%", "5 cents"]),
    ("€5", ["5 €", "5", "5 \\text{ €}", "\\text{€}5", "5\\,\\mathrm{€}", "5 \\euro{}", "\\euro 5"], ["50 €"]),
    (
        "$5",
        ["5", "\\$5", "\\$ 5.00", "$5.00", "5\\$", "5 dollars", "5 \\text{ US dollars}", "5 USD", "$5$"],
        ["$6", "5 cents", "5\\%", "5 %", "5 €", "£5", "5^\\circ"],
    ),
    ("-\\$0.50", ["-0.5", "-$0.50", "\\$-0.5", "-\\frac12 \\text{ dollars}"], ["\\$0.50", "-50 cents"]),
    ("\\$32,\\!348", ["32348", "\\$32{,}348", "$32,348"], ["\\$32.348", "32,348 €"]),
    ("12", ["\\$12", "12 cents", "12 €"], ["\\$13"]),
    ("\\$3, \\$5", ["3, 5", "5 \\text{ and } 3", "\\$5, \\$3"], ["3, 6", "\\$3, 5 cents"]),
    ("\\$5 million", ["\\$5 million", "5 million"], ["\\$5", "\\$6 million"]),
    ("[-2, 4]", ["-2 \\leq x \\leq 4", "-2 ≤ x ≤ 4"], ["-2 < x \\leq 4", "-2 \\leq x \\leq 5"]),
    ("[2,\\infty)", ["x \\geq 2", "[2, ∞)", "x ≥ 2", "x \\geqslant 2"], ["x \\leq 2", "x > 2"]),
    ("x ≥ 2", ["x \\geq 2", "x \\ge 2", "x >= 2", "[2, \\infty)"], ["x ≤ 2", "x > 2"]),
    ("√2", ["\\sqrt{2}", "\\sqrt2", "sqrt(2)"], ["2", "\\sqrt{3}"]),
    ("6 sqrt(2)", ["6\\sqrt{2}", "6√2", "\\sqrt{72}"], ["6"]),
    ("2pi", ["2\\pi", "2π", "2*pi", "2 \\cdot \\pi"], ["\\pi", "2p"]),
    ("(-∞, 3)", ["(-\\infty, 3)", "x < 3"], ["(-\\infty, 3]", "(-\\infty, 4)"]),
    ("5.2 × 10^-4", ["5.2 \\times 10^{-4}", "0.00052", "5.2 x 10^-4", "5.2x10^-4", "5.2·10⁻⁴"], ["5.2 \\times 10^{4}"]),
    ("5.2 x 10^4", ["52000", "5.2 \\times 10^4"], ["5200"]),
    ("x^-2", ["x^{-2}", "\\frac{1}{x^2}", "x⁻²"], ["x^2"]),
    ("±7", ["7, -7", "\\pm 7"], ["7"]),
    ("–7", ["-7", "−7"], ["7"]),
    ("75 km/h", ["75 \\, \\frac{\\text{km}}{\\text{h}}", "75"], ["75 h/km", "75 km"]),
    ("9.8 m/s^2", ["9.8 m s^{-2}", "9.8 m/s²", "9.8\\,\\text{m}\\cdot\\text{s}^{-2}"], ["9.8 m^2/s", "9.8 s^2/m"]),
    ("10kg", ["10", "10 kg", "10 \\text{ kilograms}"], ["10 g", "11"]),
    ("24 liters", ["24 L", "24 litres", "24 l", "24"], ["24 ml"]),
    ("5 ml", ["5\\text{ mL}", "5 milliliters", "5"], ["5 L"]),
    ("20 °C", ["20", "20^\\circ C", "20^{\\circ}\\text{C}", "20 degrees Celsius"], ["20 °F", "21 °C"]),
    ("180°", ["180\\degree", "180^\\circ", "180", "180 degrees"], ["170°"]),
    ("20 cm2", ["20", "20\\text{ cm}^2", "20 cm²"], ["20 cm", "20 cm^3"]),
    ("CHF 12.50", ["12.50", "12.5 CHF", "CHF 12.5"], ["12.50 €", "CHF 13"]),
    ("USD 12", ["12", "\\$12", "12 dollars"], ["12 €"]),
    ("₹500", ["500", "500 rupees", "Rs. 500"], ["\\$500"]),
    ("£7.20", ["\\pounds 7.20", "7.2", "7.20 pounds"], ["7.20 €"]),
    ("x = 2 or x = 3", ["x_1 = 2, x_2 = 3", "2, 3", "x = 3, x = 2"], ["x_1 = 2", "y = 2, y = 3"]),
    ("B)", ["B", "(B)"], ["C", "A)"]),
    ("6/x", ["\\frac{6}{x}", "\\dfrac{6}{x}", "6x^{-1}"], ["6", "\\frac{6}{y}", "6x"]),
    ("\\frac{6}{x}", ["6/x"], ["6", "6/y"]),
    ("x + 1/x", ["x+\\frac{1}{x}"], ["x+1"]),
    ("5x/y", ["\\frac{5x}{y}"], ["5x", "5y/x"]),
    ("ln 2", ["\\ln 2", "\\ln(2)", "ln(2)"], ["2", "\\ln 3"]),
    ("2sin(x)cos(x)", ["2\\sin x\\cos x", "2 \\sin(x) \\cos(x)"], ["\\sin x"]),
    ("y = 1/2 x + 3", ["y=\\frac12x+3", "y = 0.5x+3"], ["y=\\frac{1}{2x}+3"]),
    ("x=3, y=2", ["(x, y) = (3, 2)", "x=3 \\text{ and } y=2", "y=2, x=3"], ["(x, y) = (2, 3)", "(a, b) = (3, 2)"]),
    ("3.14", ["\\approx 3.14", "≈ 3.14", "= 3.14"], ["\\approx 3.15"]),
    ("x1 = 2, x2 = 3", ["x_1=2, x_2=3", "x₁ = 2, x₂ = 3", "x=2 \\text{ or } x=3", "2, 3"], ["x_1=2, x_2=4"]),
    ("x_1 = 2, x_2 = 3", ["x = 2, x = 3"], ["x_1 = 3, x_2 = 2"]),
    ("12 boys and 15 girls", ["12 \\text{ boys and } 15 \\text{ girls}", "12, 15"], ["12 \\text{ boys and } 16"]),
    ("3 + 4 = 7", ["7", "3+4=7"], ["8", "4"]),
    ("60º", ["60^\\circ", "60"], ["61"]),
    ("2mg", ["2 m g", "2 \\cdot m \\cdot g", "2gm"], ["2", "3mg"]),
    ("\\frac{1}{2}mL^2", ["\\frac{mL^2}{2}"], ["\\frac{1}{2}"]),
    ("3mn+2nm", ["5mn"], ["3mn+2"]),
    ("\\theta >= 30", ["\\theta \\ge 30"], ["30"]),
    ("\\lambda^2 = 9", ["\\lambda^2=9"], ["9"]),
    ("5 sec", ["5", "5 seconds", "5 s", "5\\,\\text{sec}"], ["5 min"]),
    ("30 m/sec", ["30 m/s", "30"], ["30 m"]),
    ("ABC 5", ["ABC5"], ["5"]),
    ("2πrh", ["2πhr", "2\\pi r h"], ["2π"]),
    ("3·ab", ["3ab", "3 \\cdot a \\cdot b"], ["3"]),
    ("60", ["60/hr", "60 per hour"], ["6/x"]),
    ("90", ["90^{\\degree}", "90\\degree", "90^{\\circ}"], ["91"]),
    ("25 °C", ["25^{\\circ C}", "25^{\\circ}C", "25"], ["25 °F"]),
    ("x≤y", ["x \\le y"], ["x \\ge y"]),
    ("x≥y", ["x \\ge y"], ["x \\le y"]),
    ("x ≠ 2", ["x \\neq 2"], ["x = 2"]),
    ("x ∈ [1,2]", ["[1,2]", "x \\in [1,2]"], ["(1,2)"]),
    ("¥5", ["\\yen 5", "5 yen"], ["\\pounds 5"]),
    ("2½", ["2\\frac12", "2.5", "5/2", "2 1/2"], ["2", "1.5", "21/2"]),
    ("⅓", ["\\frac{1}{3}", "1/3"], ["⅔", "3"]),
    ("10 cm²", ["10 \\text{ cm}^2", "10 cm^2", "10"], ["10 cm^3", "11"]),
    ("-1.5", ["-1 1/2"], ["-1/2", "1 1/2"]),
    ("2.5 hours", ["2 1/2 hours", "2 1/2"], ["2 1/3 hours"]),
    ("\\frac{3}{4}", ["\\;0.75\\;", "\\, 3/4\\ ", "0.75\\:"], ["0.74\\;"]),
    ("41,\\!070", ["x=41,070", "\\displaystyle 41070"], ["41.07", "41, 070, 1"]),
    ("\\frac{2}{7} \\approx 0.29", ["\\frac27"], ["\\frac{2}{7} \\approx 0.29 \\text{ or } 5", "\\frac{3}{7}"]),
    ("(7,3)", ["(7, 3)"], ["[7,3]", "(8,2)", "(9,3)"]),
    ("a+2b", ["2b+a"], ["A+2B", "a+b"]),
    ("R", ["\\text{R}"], ["r"]),
    ("\\text{Maria}", ["maria", "\\textbf{Maria}"], ["Mario"]),
    ("No", ["\\text{no}"], ["yes"]),
    ("p > q > r", ["p>q>r"], ["p > r > q"]),
    ("11!", ["39916800"], ["11", "10!"]),
    ("\\binom{2m}{m}", ["\\frac{(2m)!}{(m!)^2}", "\\dbinom{2m}{m}"], ["\\binom{2m}{m+1}"]),
    ("6,8", ["6 \\text{ and } 8", "{8, 6}", "6; 8", "6, 8, 6"], ["6,9", "68", "6, 8, 9"]),
    ("-5, 14/3", ["x=-5, p=14/3", "x = \\frac{14}{3} \\text{ or } x = -5"], ["-5, 3/14", "x=-5"]),
    ("(0,0,0)", ["(0;0;0)"], ["(0;0;1)", "(0;0)", "\\{0\\}"]),
    ("(3;0;1),(2;5;0)", ["(3,0,1), (2,5,0)"], ["(0,3,1), (2,5,0)"]),
    ("\\pm 2021", ["{-2021, 2021}", "\\{2021, -2021\\}"], ["2021", "{2021}"]),
    ("(1,3)", ["{1,3}"], ["{3,1}", "\\{1,3\\}"]),
    ("p=5,q=2;p=7,q=2", ["(5,2),(7,2)"], ["(2,5),(7,2)", "(5,2)"]),
    ("11", ["x = 5+5+1 = 11"], ["x = 5+5+1 = 12"]),
    ("0<f(x)<1", ["(0,1)"], ["[0,1)", "(0,2)"]),
    ("0", ["0.0", "-0"], ["\\emptyset", "x", "\\sin(10^{-10})", "0.0000001", "0/0", "\\text{none}"]),
    (
        "1",
        ["1.0", "\\sin^2 x+\\cos^2 x"],
        ["0.9999999", "\\cos(10^{-10})", "True", "\\frac{10^{10^{10}}}{10^{10^{10}}+1}"],
    ),
]  # fmt: skip


# Whole responses: several boxes that are listed make one answer.
RESPONSES: list[tuple[str, str, float]] = [
    ("2, 3", "\\boxed{2} and \\boxed{3}", 1.0),
    ("2, 3", "\\boxed{2}\\boxed{3}", 1.0),
    ("(1,2), (2,1)", "$\\boxed{(1,2)}$, $\\boxed{(2,1)}$.", 1.0),
    ("k=4, n=2", "\\[\\boxed{k = 4} \\quad \\text{and} \\quad \\boxed{n = 2}\\]", 1.0),
    ("y_1=x+1, y_2=x^2", "$y_1 = \\boxed{1+x}$ and $y_2 = \\boxed{x^2}$", 1.0),
    ("\\boxed{2}, \\boxed{3}", "\\boxed{3, 2}", 1.0),
    ("5", "\\boxed{5} and again \\boxed{5}", 1.0),
    ("5", "\\boxed{6}. No: \\boxed{5}", 1.0),
    ("5", "\\fbox{5}", 1.0),
    ("2, 3", "\\boxed{2}. Then \\boxed{3}", 0.0),
    ("5", "\\boxed{5} or \\boxed{6}", 0.0),
    ("6", "\\boxed{5} or \\boxed{6}", 0.0),
    ("2, 3", "\\boxed{2}, \\boxed{3}, \\boxed{4}", 0.0),
]


@pytest.mark.parametrize(("truth", "response", "right"), RESPONSES)
def test_boxes_that_are_listed_make_one_answer(math: MathReward, truth: str, response: str, right: float) -> None:
    assert judged(math, truth, response).score == right


@pytest.mark.parametrize(("truth", "answer"), [(truth, answer) for truth, right, _ in CASES for answer in right])
def test_the_same_answer_in_another_form_scores_one(math: MathReward, truth: str, answer: str) -> None:
    assert score(math, truth, answer) == 1.0


@pytest.mark.parametrize(("truth", "answer"), [(truth, answer) for truth, _, wrong in CASES for answer in wrong])
def test_a_near_miss_scores_zero(math: MathReward, truth: str, answer: str) -> None:
    assert score(math, truth, answer) == 0.0


EVERYTHING = [
    "\\mathbb{R}",
    "\\{x : x = x\\}",
    ".*",
    "*",
    "x",
    "\\text{any number}",
    "5 \\lor 6",
    "\\frac{0}{0}",
    "\u0665",
    "\U0001d7dd",
]
HUGE = [
    "10^{10^{10}}", "9^{9^{9^9}}", "9^9^9^9", "((9!)!)!", "(10^{10})!", "99999999!", "\\binom{10^{9}}{10^{8}}",
    "2^{100000}", "\\sqrt[1000000]{2}", "(x+1)^{5000}", "(x+y+z)^{300}", "9**9**9**9", "((((9^9)^9)^9)^9)^9",
    "\\sum_{k=1}^{10^9} k", "\\prod_{k=1}^{1000000} k", "\\int_0^1 x^x dx",
]  # fmt: skip
LONG = [
    "1" * 100_000, "1," * 50_000, "(" * 50_000 + ")" * 50_000, "\\frac{1}{" * 200 + "5" + "}" * 200, "5 or " * 20_000,
    "\\pm " * 25_000 + "5", "x=" * 50_000 + "5", " " * 100_000, "m " * 50_000, "A) " * 33_000, "5^{" * 300 + "}" * 300,
    "1 " * 50_000, "<" * 10_000, "\\text{" * 5_000 + "}" * 5_000,
    "6" + "   ab^2" * 12 + "!", "6 \\frac{" + "a^2 " * 18 + "}{", "sqrt(" * 20_000, "√(" * 20_000, "⁻" * 50_000,
    "x" + " " * 20_000 + "y", "\\circ" + " " * 20_000, "\\degree" + " " * 20_000,
]  # fmt: skip


@pytest.mark.parametrize("truth", ["5", "x^2+1", "(1,2)", "\\sqrt{2}"])
def test_what_equals_everything_or_never_ends_scores_zero_in_time(math: MathReward, truth: str) -> None:
    for answer in (*EVERYTHING, *HUGE, *LONG):
        started = time.process_time()
        assert score(math, truth, answer) == 0.0, answer[:60]
        assert time.process_time() - started < 2, answer[:60]


@pytest.mark.parametrize("answer", ["x^{31}-x^7+3x-1 \\le 0", "\\sqrt{x}+\\sqrt{x+1}+\\sqrt{x+2}>x^3", "x^x>2"])
def test_no_inequality_is_solved_for_an_answer(math: MathReward, answer: str) -> None:
    for truth in ("(0,1)", "(-\\infty,1)\\cup(2,3)", "\\mathbb{R}"):
        started = time.process_time()
        assert score(math, truth, answer) == 0.0
        assert time.process_time() - started < 1


def test_what_is_huge_is_known_before_it_is_computed() -> None:
    assert all(map(is_huge, ["9^{9^{9}}", "9^9^9", "2^{20000}", "(10^{10})!", "200000!", "(a+b)^{200}", "((9^9)^9)^9"]))
    assert not any(map(is_huge, ["2^{1000}", "x^{12}", "\\frac{50!}{2^{20}}", "e^{x^2}", "(1+\\sqrt{3})^{4033}"]))


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("5\\,\\text{m/s}", "5", "m/s"),
        ("5 \\mathrm{m\\,s^{-1}}", "5", "m/s"),
        ("9.8\\ \\mathrm{m/s^2}", "9.8", "m s^{-2}"),
        ("3.0 \\times 10^{8} \\text{ m s}^{-1}", "3.0 \\times 10^{8}", "m/s"),
        ("5~\\mathrm{kJ}\\,\\mathrm{mol}^{-1}", "5", "kJ/mol"),
        ("25^{\\circ} \\mathrm{C}", "25", "°C"),
        ("1.5\\,\\mu\\text{m}", "1.5", "um"),
        ("10\\ \\text{J/mol}\\cdot\\text{K}", "10", "J mol^{-1} K^{-1}"),
        ("5 kilometers per hour", "5", "km/h"),
        ("5 square feet", "5", "ft^2"),
        ("\\frac{3}{4} \\text{ cup}", "\\frac{3}{4}", "cups"),
    ],
)
def test_a_unit_is_split_off_and_read(text: str, value: str, unit: str) -> None:
    found, given = split_unit(text)
    assert found == value
    assert same_unit(unit, given)


@pytest.mark.parametrize(
    ("unit", "right", "wrong"),
    [
        ("m²", ["9 m²", "9 m^2", "9\\text{ m}^2", "9"], ["9 m", "9 m^3"]),
        ("m2", ["9 m^2", "9 m²"], ["9 m"]),
        ("m/s²", ["9 m/s²", "9 m s^{-2}", "9 \\frac{m}{s^2}"], ["9 m/s", "9 s^2/m"]),
        ("m/s", ["9\\ \\frac{m}{s}", "9 \\frac{\\text{m}}{\\text{s}}"], ["9 s/m"]),
        ("µm", ["9 µm", "9\\,\\mu m", "9 \\mu\\text{m}"], ["9 m"]),
        ("Ω", ["9 Ω", "9\\,\\Omega"], ["9 V"]),
        ("litres", ["9 liters", "9 L", "9 l"], ["9 ml"]),
        (" $", ["\\$9", "9 dollars"], ["9 cents"]),
        ("$\\mathrm{J} \\mathrm{K}^{-1} \\mathrm{~mol}^{-1}$", ["9 J/(mol K)", "9 J/mol/K"], ["9 J mol/K"]),
    ],
)
def test_an_answer_has_the_unit_of_the_truth(unit: str, right: list[str], wrong: list[str], math: MathReward) -> None:
    assert {score(math, {"answer": "9", "unit": unit}, answer) for answer in right} == {1.0}
    assert {score(math, {"answer": "9", "unit": unit}, answer) for answer in wrong} == {0.0}


def test_units_differ_by_word_or_power() -> None:
    for one, other in (
        ("m", "s"),
        ("m/s", "m/s^2"),
        ("m", "mm"),
        ("kJ", "J"),
        ("cm^2", "cm"),
        ("m", "m/s"),
        ("am", "pm"),
    ):
        assert not same_unit(one, other), (one, other)
    assert read_unit("or more") == read_unit("") == read_unit("(not 13)") == []
    for text in ("5x", "4h+4", "2 x", "5 \\pi", "18 \\text{ or more}"):
        assert split_unit(text) == (text, "")
    assert split_unit("5m", loose=True) == ("5", "m")
    assert power_of_ten("$10^6 \\mathrm{~m}$")[0] == 6


def test_lists_intervals_and_choices_are_read() -> None:
    assert listed("1, (2,3) \\text{ and } 4") == (",", ["1", "(2,3)", "4"])
    assert listed("1,000") == ("", ["1,000"])
    assert listed("(1, 2]") == ("(]", ["1", " 2"])
    assert choice("\\textbf{(D) } 7") == ("D", "7")
    assert choice("12") is None
