"""Broken answers told from odd ones, and a quality held against its limits."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sweeper.core.outcome import Quality, UnfitName
from sweeper.core.prose import prose
from sweeper.core.quality import (
    GREEDY_PROMPTS,
    SCORED_TEXT,
    Guard,
    agreement,
    collapsed,
    common_prefix,
    degenerate,
    judge,
    loop,
    remark,
)
from sweeper.engines.fake_server import SALAD

LANGUAGES = (
    "The quick brown fox jumps over the lazy dog, and nobody in the village is surprised.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; später gibt es Grießbrei.",
    "Dès Noël où un zéphyr haï me vêt de glaçons würmiens, je dîne d’exquis rôtis de bœuf.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío, añoraba a su cachorro.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy, a proto si koupil nový počítač.",
    "Pijamalı hasta yağız şoföre çabucak güvendi; İstanbul’da hava çok güzeldi.",
    "Do bạch kim rất quý nên sẽ dùng để lắp vô xương. Hôm nay trời đẹp quá!",
    "Съешь ещё этих мягких французских булок, да выпей чаю. Завтра IT-отдел обновит HTML-код.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, και ύστερα πίνω καφέ στην πλατεία.",
    "いろはにほへと、散りぬるを。東京でPythonのプログラムを書いて、GitHubに公開しました。",
    "我能吞下玻璃而不伤身体。人工智能(AI)技术和GPU服务器正在改变我们的生活,用vLLM很快。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 서울에서 AI를 배운다.",
    "صِف خَلقَ خَودٍ كَمِثلِ الشَمسِ إِذ بَزَغَت، وأنا أتعلم البرمجة بلغة Python كل يوم.",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה. אני לומד לתכנת ב-Python כל בוקר.",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश हुआ। मुझे Python पसंद है।",
    "আমার সোনার বাংলা, আমি তোমায় ভালোবাসি। চিরদিন তোমার আকাশ, তোমার বাতাস।",
    "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம்.",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ใช้ GPU ทำงาน AI ได้เร็วมาก",
    "მინას ვჭამ და არა მტკივა. თბილისი საქართველოს დედაქალაქია.",
    "Կրնամ ապակի ուտել և ինծի անհանգիստ չըներ։ Երևանը մայրաքաղաք է։",
    "የአማርኛ ጽሑፍ በጣም ቆንጆ ነው። አዲስ አበባ የኢትዮጵያ ዋና ከተማ ናት።",
    "Mỗi ngày tôi đọc sách. Ich lese jeden Tag ein Buch. Je lis un livre tous les jours.",
    "🚀 Launch day! 🎉🎉 Thanks to everyone 💙 — see you on the moon 🌕✨ 👩‍💻👨‍👩‍👧‍👦",
)
CODE = (
    'def bisect_left(a, x, lo=0, hi=None):\n    """Return the place of x."""\n    if lo < 0:\n'
    "        raise ValueError('lo must be non-negative')\n    while lo < hi:\n        lo += 1\n",
    '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Space Invaders</title>\n'
    "<style>body{margin:0;background:#000}canvas{display:block}</style></head>\n<body>\n"
    '<canvas id="game" width="800" height="600"></canvas>\n<script>const c=document'
    ".getElementById('game').getContext('2d');let x=0;function draw(){c.fillRect(x,0,5,5);"
    "requestAnimationFrame(draw)}draw();</script></body></html>\n",
    "for(let i=0;i<invaders.length;i++){if(invaders[i].alive){ctx.drawImage(img,invaders[i].x,"
    "invaders[i].y)}}\n",
    "std::map<std::string, std::vector<std::pair<int, double>>>& m = *ptr->get(); ++i; x >>= 2;\n",
    '{"id": 17, "tags": ["a", "b", null], "nested": {"x": [1, 2.5, -3e-7], "ok": true}}\n',
    "SELECT u.name, COUNT(*) FROM users u JOIN orders o ON o.uid = u.id GROUP BY 1 HAVING c > 3;\n",
    "$ curl -sS 'http://localhost:8080/v1/models' | jq -r '.data[].id' && echo $?\n",
    "\\begin{align} \\nabla \\times \\vec{E} &= -\\frac{\\partial \\vec{B}}{\\partial t} \\\\ "
    "α + β ≤ γ, ∀x ∈ ℝ: ∑ᵢ xᵢ² ≥ 0, Δt = 3 μs, e^{iπ} = −1 \\end{align}\n",
    "| name  | speed | depth |\n|-------|------:|------:|\n| alpha |  12.5 |   512 |\n"
    "| beta  |  13.1 |  2048 |\n",
    "ATGCGTACGTTAGCCTAGGCTTACGATCGATCGGATCTTAGCGATTACGGCATCGATTACGCGT\n",
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5\n",
    "2026-01-03,17.25,0.99,-4\n2026-01-04,17.31,0.97,-4\n2026-01-05,17.02,0.98,-5\n",
    "      /\\_/\\      +------+------+\n     ( o.o )     |  ok  | fail |\n"
    "      > ^ <      +------+------+\n",
    "\x1b[32mPASS\x1b[0m tests/test_a.py\n\x1b[31mFAIL\x1b[0m tests/test_b.py\n",
    "# ====================================================\n# Settings\n# ===================\n",
    "\tmov rax, [rbp-0x18]\n\txor ecx, ecx\n\tjmp .L2\n.L3: add DWORD PTR [rbp-4], 1\n",
    "0x7f3a 0xdeadbeef 01101001 10010110 3.14159265358979323846264338327950288\n",
)
LISTS = (
    "English: Hello, Русский: Привет, 日本語: こんにちは, 中文: 你好, العربية: مرحبا, ไทย: สวัสดี, "
    "हिन्दी: नमस्ते, 한국어: 안녕하세요, Ελληνικά: Γεια, עברית: שלום, ქართული: გამარჯობა\n",
    "Deutsch · English · Español · Русский · 日本語 · 한국어 · العربية · עברית · हिन्दी · ไทย\n",
    "| hello | привет | こんにちは |\n| world | мир | 世界 |\n| thanks | спасибо | ありがとう |\n",
    "Deutsch English Español Русский 日本語 한국어 العربية עברית हिन्दी ไทย\n",
)

pieces = st.sampled_from((*LANGUAGES, *CODE, *LISTS))


@settings(max_examples=400, deadline=None)
@given(st.lists(pieces, min_size=1, max_size=12), st.sampled_from(["\n", " ", "\n\n", ""]),
       st.integers(0, 400), st.integers(0, 400))  # fmt: skip
def test_no_text_that_people_write_is_called_broken(
    parts: list[str], between: str, start: int, cut: int
) -> None:
    """Whatever the language, wherever it begins and however it is cut off."""
    whole = between.join(parts)
    text = whole[start : len(whole) - cut]
    if len(text.strip()) >= 120:
        assert degenerate(text) is None
    assert degenerate(whole) is None


@pytest.mark.parametrize("text", [*LANGUAGES, *CODE, *LISTS, *GREEDY_PROMPTS, SCORED_TEXT])
def test_each_text_alone_and_many_times_over_is_no_garbage(text: str) -> None:
    assert degenerate(text) is None
    assert degenerate(text * 20) is None


@given(st.integers(0, 10**6), st.integers(1, 60))
def test_the_text_that_fills_prompts_is_sound(seed: int, sentences: int) -> None:
    assert degenerate(prose(seed, sentences)) is None


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=400))
def test_any_text_gets_an_answer(text: str) -> None:
    found = degenerate(text)
    assert found is None or found
    ending = loop(text)
    if ending is not None:
        assert 0 < ending.share <= 1
        assert ending.repeats >= 3
        assert (ending.unit * (ending.repeats + 1))[: ending.repeats] in ending.unit * 400


@pytest.mark.parametrize(
    "text",
    [
        "?" * 40,
        "!" * 2000,
        "0" * 64,
        "\n!" * 100,
        "|---" * 50,
        "GGGG" * 30,
        "ассасс" * 40,
        "哈" * 100,
        "<pad>" * 40,
        "[UNK] " * 40,
        "<unused12>" * 20,
        "<0x9F>" * 20,
        "�" * 40,
        "A!" + "!" * 200,
        "/******/" * 20,
    ],
)
def test_one_token_for_ever_is_broken(text: str) -> None:
    assert "nothing but" in str(degenerate(text))


@pytest.mark.parametrize("text", ["", " ", "\n\n\n", "\t \r\n", "\xa0"])
def test_an_answer_of_nothing_is_broken(text: str) -> None:
    assert degenerate(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        # Real answers of a sound 270M model at temperature 0, ignoring the end of text.
        " eleven, eleven, eleven, eleven, eleven, eleven, eleven, eleven, eleven, eleven, eleven,",
        " thirteen, fourteen, fifteen, sixteen, seventeen" + ", eighteen" * 19,
        " west. The sun rises in the east and sets in the" * 3,
        "The keeper was not there. " * 30,
        "<end_of_turn>\n" * 30,
        "ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha",
        "ahahahahahahahahahahah",
        "哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈",
        "no!",
        "!!!!",
        "The answer is 42" + "." * 30,
        "x = [" + "0, " * 40,
    ],
)
def test_a_small_model_that_goes_round_in_circles_is_not_broken(text: str) -> None:
    assert degenerate(text) is None


def test_a_loop_is_graded_by_how_much_of_the_text_it_takes() -> None:
    assert loop(LANGUAGES[0]) is None
    late = LANGUAGES[0] + " and so on" * 10
    found = loop(late)
    assert found is not None
    assert sorted(found.unit) == sorted(" and so on")
    assert found.repeats >= 10
    assert found.share == pytest.approx(100 / len(late), abs=0.02)
    whole = loop("ab" * 50 + "a")
    assert whole is not None
    assert (sorted(whole.unit), whole.repeats, whole.share) == (["a", "b"], 50, 1.0)


@given(
    st.text(st.sampled_from("abc d,\n"), min_size=1, max_size=30).filter(lambda t: t.strip() == t),
    st.integers(3, 40),
)
def test_a_repeated_unit_is_found_whatever_it_is(unit: str, times: int) -> None:
    text = unit * times
    if len(text) < 16:
        return
    found = loop(text)
    assert found is not None
    assert found.share == 1
    assert len(unit) % len(found.unit) == 0
    assert found.repeats * len(found.unit) == len(text)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(100, 600))
def test_tokens_drawn_by_chance_are_broken(seed: int, tokens: int) -> None:
    luck = random.Random(seed)
    text = "".join(luck.choice(SALAD) for _ in range(tokens))
    assert degenerate(text) is not None
    no_bytes = [each for each in SALAD if "�" not in each and "\x02" not in each]
    salad = degenerate("".join(luck.choice(no_bytes) for _ in range(tokens)))
    assert "scripts" in str(salad)


@given(st.text(max_size=200), st.sampled_from("�\x01\ue000"), st.integers(30, 300))
@example("", "�", 30)
def test_bytes_that_are_no_text_are_broken(sound: str, character: str, count: int) -> None:
    assert degenerate(sound + character * max(count, len(sound))) is not None


def test_a_character_cut_in_two_and_an_icon_are_nothing() -> None:
    for text in LANGUAGES:
        assert degenerate(text + "�") is None
        assert degenerate("�� " + text + "�") is None
        assert degenerate("\ue0b0 \uf418 " + text) is None


def test_a_long_text_is_looked_at_in_no_time() -> None:
    texts = ["!" * 200_000, "ab " * 60_000, prose(1, 3000), "".join(LANGUAGES) * 100]
    began = time.process_time()
    for text in texts:
        degenerate(text)
    assert time.process_time() - began < 5


# ---- Several answers ---------------------------------------------------------------------------


def test_one_word_for_every_prompt_is_no_working_engine() -> None:
    """These are the answers of a model whose attention was switched off."""
    answers = [" one," * 24, " the" * 48, " the old" * 24]
    assert [degenerate(each) for each in answers] == [None, None, None]
    assert "'one, '" in str(collapsed(answers))
    assert collapsed([*answers, LANGUAGES[0]]) is None
    assert collapsed(answers[:1]) is None
    assert collapsed([]) is None


def test_one_degenerate_answer_is_enough() -> None:
    assert "number 2" in str(collapsed([LANGUAGES[0], "!" * 100]))


def test_a_copied_sentence_beside_a_loop_is_no_collapse() -> None:
    assert (
        collapsed(
            [
                " eleven," * 24,
                " west. The sun rises in the east and sets in the west. The sun rises in the east.",
                " he saw a ghost.\n\nThe ghost was a young man, and he was a man of great courage.",
            ]
        )
        is None
    )


# ---- Beside the reference ----------------------------------------------------------------------

tokens = st.lists(st.integers(0, 5), max_size=30)


@given(tokens, tokens, tokens)
def test_the_common_prefix_is_common_and_the_longest(
    shared: list[int], one: list[int], other: list[int]
) -> None:
    a, b = shared + one, shared + other
    found = common_prefix(a, b)
    assert found == common_prefix(b, a) >= len(shared)
    assert a[:found] == b[:found]
    assert found == min(len(a), len(b)) or a[found] != b[found]


@given(st.lists(tokens, max_size=4))
def test_answers_agree_wholly_with_themselves(answers: list[list[int]]) -> None:
    found = agreement(answers, answers)
    if not any(answers):
        assert found is None
        return
    assert found is not None
    assert found.share == 1
    assert found.tokens == found.of
    silent = agreement(answers, [[] for _ in answers])
    assert silent is not None
    assert (silent.tokens, silent.share, silent.longest) == (0, 0, 0)


def test_agreement_is_the_mean_over_the_answers() -> None:
    found = agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 9], [5, 6, 7]])
    assert found is not None
    assert (found.tokens, found.of, found.share, found.longest) == (4, 6, 0.75, 2)
    with pytest.raises(ValueError, match="1 answers"):
        agreement([[1], [2]], [[1]])


# ---- The judge ---------------------------------------------------------------------------------

REFERENCE = Quality(mean_logprob=-2.2612)
"""Of Gemma 3 270M with an f16 KV cache, llama.cpp on a CPU."""
SOUND: dict[str, tuple[int, float, float]] = {
    "the same again": (144, 1.0, -2.2612),
    "no flash attention": (112, 0.78, -2.2720),
    "q8_0": (112, 0.78, -2.2666),
    "q5_1": (64, 0.44, -2.3546),
    "q4_0": (61, 0.42, -2.3545),
    "iq4_nl": (56, 0.39, -2.4027),
    "batches of 32": (144, 1.0, -2.2665),
    "other kernels": (144, 1.0, -2.2566),
}
BROKEN: dict[str, tuple[int, float, float]] = {
    "attention half as strong": (48, 0.33, -6.0131),
    "no attention": (0, 0.0, -9.5436),
    "a damaged layer": (15, 0.1, -3.5370),
    "three damaged layers": (0, 0.0, -13.0190),
}


def _quality(tokens: int, share: float, logprob: float | None, **others: Any) -> Quality:
    return Quality(
        reference=7, prefix_tokens=tokens, prefix_share=share, mean_logprob=logprob, **others
    )


@pytest.mark.parametrize("name", SOUND)
def test_what_was_measured_of_sound_servers_may_win(name: str) -> None:
    assert judge(Guard(), _quality(*SOUND[name], end_prefix_share=1.0), REFERENCE) is None


@pytest.mark.parametrize("name", BROKEN)
def test_what_was_measured_of_broken_servers_must_not(name: str) -> None:
    found = judge(Guard(), _quality(*BROKEN[name]), REFERENCE)
    assert found is not None
    unfit, words = found
    assert unfit is UnfitName.GARBAGE_OUTPUT
    assert "attempt 7" in words
    assert any(character.isdigit() for character in words)


def test_a_quality_says_what_is_worth_a_remark_and_no_more() -> None:
    assert remark(Guard(), _quality(*SOUND["q8_0"], end_prefix_share=1.0), REFERENCE) is None
    said = remark(Guard(), _quality(*SOUND["iq4_nl"], end_prefix_share=0.3), REFERENCE)
    assert said is not None
    for words in ("39% of the greedy answers", "30% of the greedy answers", "0.141 nats"):
        assert words in said


def test_what_was_not_measured_is_not_held_against_anything() -> None:
    assert judge(Guard(), Quality()) is None
    assert judge(Guard(), Quality(), REFERENCE) is None
    assert judge(Guard(), REFERENCE) is None
    assert judge(Guard(), _quality(144, 1.0, -9.0), Quality()) is None
    assert remark(Guard(), Quality(), REFERENCE) is None


def test_an_answer_shorter_than_the_limit_that_agrees_wholly_is_good() -> None:
    assert judge(Guard(prefix_min_tokens=10), _quality(3, 1.0, None)) is None
    assert judge(Guard(prefix_min_tokens=10), _quality(9, 0.2, None)) is not None


def test_an_engine_that_changes_while_it_is_measured_must_not_win() -> None:
    found = judge(Guard(), Quality(end_prefix_share=0.02))
    assert found is not None
    assert "2% of the first greedy answers" in found[1]
    assert judge(Guard(end_prefix_min_share=None), Quality(end_prefix_share=0.0)) is None


def test_a_floor_needs_no_reference() -> None:
    guard = Guard(mean_logprob_min=-6.0)
    assert judge(guard, Quality(mean_logprob=-5.9)) is None
    found = judge(guard, Quality(mean_logprob=-6.1))
    assert found is not None
    assert "-6.000" in found[1]
    assert judge(guard, Quality(mean_logprob=math.nan)) is not None


def test_a_reference_that_knows_no_english_cannot_tell_what_is_lost() -> None:
    """Random weights find a text as improbable as any; rounding alone moves that by many nats."""
    chance = Quality(mean_logprob=-365.3)
    assert judge(Guard(), _quality(144, 1.0, -380.0), chance) is None


@given(st.integers(0, 144), st.floats(0, 1), st.floats(-20, 0), st.floats(0, 1), st.floats(-20, 0))
def test_a_quality_that_is_nowhere_worse_is_never_judged_worse(
    tokens: int, share: float, logprob: float, end: float, reference: float
) -> None:
    guard, beside = Guard(), Quality(mean_logprob=reference)
    worse = _quality(tokens, share, logprob, end_prefix_share=end)
    better = _quality(
        min(tokens + 1, 144), min(share + 0.01, 1), min(logprob + 0.1, 0),
        end_prefix_share=min(end + 0.01, 1),
    )  # fmt: skip
    if judge(guard, worse, beside) is None:
        assert judge(guard, better, beside) is None


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ({"prefix_min_tokens": -1}, "prefix_min_tokens"),
        ({"end_prefix_min_share": 1.5}, "end_prefix_min_share"),
        ({"prefix_warn_share": math.nan}, "prefix_warn_share"),
        ({"logprob_drop_max": -0.1}, "logprob_drop_max"),
        ({"logprob_drop_warn": math.inf}, "logprob_drop_warn"),
        ({"mean_logprob_min": 0.5}, "mean_logprob_min"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_by_its_name(limits: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Guard(**limits)
