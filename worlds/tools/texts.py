"""Read texts as a person does: find their words, and measure how alike two answers are.

Paper: sim(a, a') of Eq. 1, for answers in words; the paper leaves the measure open.

There are two readings. `words_of` is coarse: it decides which tasks are the same and what a request
mentions, so case, accents, punctuation and look-alike letters make no difference. `answer_words` is
exact where answers differ by a single character: C++ is not C#, and 1/2 is not 2/1.

Deviations: accents, look-alikes and articles are those of European languages.
"""
import re
import unicodedata
from collections import Counter

ARTICLES = {"a", "an", "the"}
QUOTES = "\"'`\u201c\u201d\u2018\u2019\u00ab\u00bb*"  # and Markdown's emphasis
ENDS = ".,;:?\u2026"  # what follows a word in a sentence
CURRENCIES = "$\u20ac\u00a3\u00a5"
SYMBOLS = r"[+<=>|~\u00ac\u00b1\u00d7\u00f7\u2260\u2264\u2265\u221a%^/" + CURRENCIES + "]"
# a number, a word with the symbols of its name (C++, C#), or a symbol
WORD = re.compile(r"(?:(?<![\w.])-)?\d+(?:\.\d+)?|[^\W\d_]+(?:[+#]+(?!\w))?|" + SYMBOLS)
# invisible characters besides those of category Cf: joiners, fillers, variation selectors
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f"
                    "\U000e0100-\U000e01ef]")
# lower-case Cyrillic, Greek and phonetic letters, and the Latin ones that they look like
LOOK_ALIKES = str.maketrans("авекмнорстухіјѕһԁԛԝӏ" + "αεικονρτυχ" + "ɑɡı",
                            "abekmhopctyxijshdqwl" + "aeikovptyx" + "agi")


# ---------------------------------------------------------------------------------------------
# as a person reads them


def as_read(text) -> str:
    """Return a text as a person sees it, without invisible characters.

    Full-width letters become the usual ones (NFKC), and a superscript follows a ^.
    """
    text = re.sub("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+", r"^\g<0>", text)
    text = unicodedata.normalize("NFKC", text).replace("\u2800", " ")  # Braille's blank
    seen = (c for c in text if c.isspace() or unicodedata.category(c) not in ("Cf", "Cc"))
    return UNSEEN.sub("", "".join(seen))


def texts_as_read(value):
    """Return a JSON value for keys of tasks: its texts are `folded`, with single blanks."""
    if isinstance(value, dict):
        return {key: texts_as_read(part) for key, part in value.items()}
    if isinstance(value, list):
        return [texts_as_read(part) for part in value]
    if isinstance(value, str):
        return " ".join(folded(as_read(value)).split())
    return value


def folded(text: str) -> str:
    """Return a text in lower case, with Latin letters instead of their look-alikes."""
    return text.casefold().translate(LOOK_ALIKES)


def joined(text) -> str:
    """Return a text as it is read, with 2000 for 2,000 and one kind of minus."""
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", as_read(text)).replace("\u2212", "-")


def without_accents(text: str) -> str:
    """Return a text with no accents on its letters. Symbols keep their strokes: \u2260 is not =."""
    characters = []
    for character in unicodedata.normalize("NFC", text):
        if character.isalpha():
            character = unicodedata.normalize("NFD", character)
        characters.append(character)
    return "".join(c for c in "".join(characters) if not unicodedata.combining(c))


def words_of(text) -> list[str]:
    """Return the words, numbers and symbols of a text: lower case, no accents, camelCase split.

    -5 is not 5, and $2,000.50 is $ and 2000.5.
    """
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", joined(text))
    words = WORD.findall(folded(without_accents(parts)))
    return [without_zeros(word) if "." in word else word for word in words]


def without_zeros(number: str) -> str:
    """Return 2000.5 for 2000.50, and 5 for 5.0."""
    return number.rstrip("0").rstrip(".")  # a regular expression is slow on many zeros


# ---------------------------------------------------------------------------------------------
# answers


def without_thought(text: str) -> str:
    """Return what follows the last </think>, or the whole text if there is none.

    Some chat templates open the thought themselves, so <think> may be missing.
    """
    return text.rpartition("</think>")[2]


def token_f1(answer: str, reference: str) -> float:
    """Return the harmonic mean of the precision and recall of words, in [0, 1].

    It is 0 if either text has no words. A currency counts only if the reference names one.
    """
    if not set(CURRENCIES) & set(reference):
        answer = re.sub(f"[{CURRENCIES}]", "", answer)
    answered, expected = Counter(answer_words(answer)), Counter(answer_words(reference))
    common = (answered & expected).total()
    return 2 * common / (answered.total() + expected.total()) if common else 0.0


def answer_words(text) -> list[str]:
    """Return the words of an answer with the symbols in them, without articles.

    Only what surrounds a word in a sentence is dropped: quotes, full stops, and brackets around
    whole words.
    """
    text = folded(without_accents(joined(text)))
    text = re.sub(rf"(?<=\d)\s(?=[%{CURRENCIES}])", "", text)  # 50 % is 50%
    text = re.sub(r"(?<=[^\d)\s])!+(?=[\s*\"']|$)", "", text)   # but 5! is not 5
    words = [_bare(word) for word in text.split()]
    words = [word for word in words if word]
    # the last word is never an article: the A of "vitamin A" is a name
    return [word for word in words[:-1] if word not in ARTICLES] + words[-1:]


def _bare(word: str) -> str:
    """Return one word of an answer without what surrounds it."""
    word = word.strip(QUOTES).rstrip(ENDS + QUOTES)
    letters = word.strip("()[]{}")
    if letters.isalpha() and len(letters) > 1:
        return letters
    number = word.strip(CURRENCIES + "%")
    if re.fullmatch(r"[-+]?\d+\.\d+", number):
        return word.replace(number, without_zeros(number))
    return word
