"""Convert text to token ids and back: chat templates, ends of turns, control tokens.

Paper: does not cover this.

Usage: a Policy is a Chat; genenv.py and interaction.py call `encode` and `decode`.

Deviations: the template, not the model's configuration, decides how a turn ends. A template that
drops a message is refused.
"""
import re
from datetime import date

from errors import UserError, one_line


class Chat:
    """Wrap a tokenizer and its chat template, if it has one.

    eos_ids: all ids that end a response. end_of_turn: the ids that follow a turn in a text to
    imitate. control_ids: the ids of control tokens, which are eos_ids and all special tokens.
    """

    def __init__(self, tokenizer, generation_config=None, chat_template_kwargs=None):
        """Raise UserError if no token ends a response.

        chat_template_kwargs: arguments for the template besides the messages. One named "date"
        (ISO) replaces today's date.
        """
        self.tokenizer, self.chat_template_kwargs = tokenizer, dict(chat_template_kwargs or {})
        eos = getattr(generation_config, "eos_token_id", None)
        if not isinstance(eos, list):  # some chat models have several
            eos = [eos]
        self.eos_ids = [i for i in dict.fromkeys([*eos, tokenizer.eos_token_id]) if i is not None]
        if not self.eos_ids:
            raise UserError("the model names no end-of-sequence token: "
                            "set eos_token in its tokenizer")
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.control_ids = {*self.eos_ids, *tokenizer.all_special_ids, *special}
        self.end_of_turn = self.eos_ids[:1]
        if tokenizer.chat_template:
            self.end_of_turn = self._template_end() or self.end_of_turn
        if self.end_of_turn[-1] not in self.eos_ids:
            self.eos_ids.append(self.end_of_turn[-1])

    def encode(self, prompt) -> list[int]:
        """Return the ids of a text as it is, or of chat messages as the template writes them.

        If the last message is the assistant's, the response begins with it. Raise UserError if
        there are messages but no template, if the template fails or leaves a message out, or if a
        world's own model does not know a word.
        """
        if isinstance(prompt, str):
            return self._encode_text(prompt)
        beginning, messages = "", prompt
        if prompt[-1]["role"] == "assistant":
            beginning, messages = prompt[-1]["content"], prompt[:-1]
        text = self._render(messages) + beginning
        for message in prompt:
            role, content = message["role"], message["content"]
            if role != "assistant" and content.strip() not in text:
                raise UserError(f"the chat template leaves out the {role}'s message: repair it")
        # the template writes BOS and headers itself, so the tokenizer must not add them again
        return self._encode_text(text)

    def _encode_text(self, text: str) -> list[int]:
        """Return the ids of a text. Raise UserError for a word that a world's own model does not
        know."""
        tok = self.tokenizer
        ids = tok.encode(text, add_special_tokens=False)
        if not tok.chat_template and tok.pad_token_id in ids:  # unknown words become padding
            unknown = {*text.split()} - {*tok.get_vocab()}
            raise UserError(f"{sorted(unknown)} not in WORDS")
        return ids

    def encode_answer(self, prompt, text: str) -> list[int]:
        """Return the ids of the assistant's answer, without those of the prompt.

        In a chat both are encoded together, because some tokenizers put a space before the first
        word of a text.
        """
        if not isinstance(prompt, str):
            begin = self.encode(prompt)
            both = self.encode([*prompt, {"role": "assistant", "content": text}])
            # otherwise a token spans the border between them, which cannot happen in sampling
            if both[:len(begin)] == begin:
                return both[len(begin):]
        return self.encode(text)

    def encode_observation(self, text: str) -> list[int]:
        """Return the ids of an observation between two turns of an episode.

        A chat template writes it as a user turn, followed by the assistant's next header. Without
        a template, it is plain text.
        """
        if not self.tokenizer.chat_template:
            return self.encode(text)
        # the policy itself draws the tokens that end its turn, so an observation begins after them
        ids, end = self.encode(self._after_turn(text)), self.end_of_turn
        return ids[len(end):] if ids[:len(end)] == end else ids

    def decode(self, ids) -> str:
        """Return the text of ids, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def has_control_tokens(self, ids) -> bool:
        """Return whether a response has a control token before its end. `decode` would hide it."""
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return not self.control_ids.isdisjoint(ids)

    def _template_end(self) -> list[int]:
        """Return the ids that the template writes after an assistant's turn, up to the first
        control token; [] if there is none before the user's turn."""
        ids = self.encode(self._after_turn("*user*").split("*user*")[0])
        for i, token in enumerate(ids):
            if token in self.control_ids:
                return ids[:i + 1]
        return []

    def _after_turn(self, text: str) -> str:
        """Return what the template writes after an assistant's turn when the user's next turn is
        `text`."""
        mark = "*turn*"
        turns = ("user", "-"), ("assistant", mark), ("user", text)
        rendered = self._render([{"role": role, "content": content} for role, content in turns])
        if mark not in rendered:
            raise UserError("the model's chat template leaves out the assistant's message")
        return rendered.partition(mark)[2]

    def _render(self, messages) -> str:
        """Return chat messages as the template writes them, with the assistant's next header."""
        options = self.chat_template_kwargs
        with one_line("the model's chat template"):  # a template is a program and may fail
            template = fix_date(self.tokenizer.get_chat_template(), options.get("date"))
            return self.tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True,
                **options)


def fix_date(template: str, day=None) -> str:
    """Return a chat template that writes `day` (ISO; None: today) where it asks for the date.

    A run passes the day on which it began, so its prompts stay the same if it is resumed later.
    """
    day = date.fromisoformat(day) if day else date.today()
    ask = r"strftime_now\(\s*([\"'])(.*?)\1\s*\)"
    return re.sub(ask, lambda match: repr(day.strftime(match[2])), template)
