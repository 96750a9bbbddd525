"""Text to token ids and back: the chat template, the end of a turn, control tokens.

Paper: not in it. Usage: a Policy is a Chat; the worlds call `encode` and `decode`.

Deviations: the template decides, not the model's configuration. A turn ends with what the template
writes after it, and a template that loses a message is refused.
"""
import re
from datetime import date

from errors import UserError, one_line


class Chat:
    """A tokenizer and its chat template, if it has one.

    eos_ids: every id that ends a response. end_of_turn: the ids that an imitated turn ends with.
    """

    def __init__(self, tokenizer, generation_config=None, chat_template_kwargs=None):
        """chat_template_kwargs: what the template is told besides the messages; "date" (ISO) stands
        for today in it. Raises UserError if no token ends a response."""
        self.tokenizer, self.chat_template_kwargs = tokenizer, dict(chat_template_kwargs or {})
        eos = getattr(generation_config, "eos_token_id", None)
        if not isinstance(eos, list):  # some chat models stop on several
            eos = [eos]
        self.eos_ids = [i for i in dict.fromkeys([*eos, tokenizer.eos_token_id]) if i is not None]
        if not self.eos_ids:
            raise UserError("the model names no end-of-sequence token: "
                            "set eos_token in its tokenizer")
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.control_ids = {*self.eos_ids, *tokenizer.all_special_ids, *special}
        self._closing = []  # what the template writes after a turn of the assistant's
        if tokenizer.chat_template:
            self._closing = self._end_of_turn()
        self.end_of_turn = self._closing or self.eos_ids[:1]
        if self.end_of_turn[-1] not in self.eos_ids:
            self.eos_ids.append(self.end_of_turn[-1])

    def encode(self, prompt) -> list[int]:
        """str -> ids without special tokens; list of chat messages -> ids by the chat template. A
        last message of the assistant's is the beginning of the response.

        Raises UserError if there is no template, or it fails or leaves a message out; without one,
        for a word that a world's own model does not know.
        """
        if isinstance(prompt, str):
            return self._encode_text(prompt)
        begun, messages = "", prompt
        if prompt[-1]["role"] == "assistant":
            begun, messages = prompt[-1]["content"], prompt[:-1]
        text = self._render(messages) + begun
        for message in prompt:
            role, content = message["role"], message["content"]
            if role != "assistant" and content.strip() not in text:
                raise UserError(f"the chat template leaves out what the {role} says: mend it")
        # the template writes BOS and headers itself: text first, then ids, no special token twice
        return self._encode_text(text)

    def _encode_text(self, text: str) -> list[int]:
        """text -> ids; raises UserError for a word that a world's own model does not know."""
        reader = self.tokenizer
        ids = reader.encode(text, add_special_tokens=False)
        if not reader.chat_template and reader.pad_token_id in ids:  # read as padding
            unknown = {*text.split()} - {*reader.get_vocab()}
            raise UserError(f"{sorted(unknown)} not in WORDS")
        return ids

    def encode_answer(self, prompt, text: str) -> list[int]:
        """What the assistant says after a prompt -> ids without those of the prompt. Both are
        encoded together: alone, some tokenizers write a blank before the first word."""
        if not isinstance(prompt, str):
            begin = self.encode(prompt)
            both = self.encode([*prompt, {"role": "assistant", "content": text}])
            # else a token lies across the border, where sampling ends one
            if both[:len(begin)] == begin:
                return both[len(begin):]
        return self.encode(text)

    def encode_observation(self, text: str) -> list[int]:
        """What stands between two turns of an episode: text -> ids without special tokens, or with
        a chat template a user turn and the assistant's next header, as the template writes them.
        """
        if not self.tokenizer.chat_template:
            return self.encode(text)
        # the tokens that end a turn are the policy's own: an observation begins after them
        return self.encode(self._after_turn(text))[len(self._closing):]

    def decode(self, ids) -> str:
        """ids -> text without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def has_control_tokens(self, ids) -> bool:
        """Whether a response holds a control token before its end, which `decode` does not show."""
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return not self.control_ids.isdisjoint(ids)

    def _end_of_turn(self) -> list[int]:
        """The ids that the chat template writes after what the assistant says, to the first control
        token; [] if there is none before the user speaks."""
        ids = self.encode(self._after_turn("*user*").split("*user*")[0])
        for i, token in enumerate(ids):
            if token in self.control_ids:
                return ids[:i + 1]
        return []

    def _after_turn(self, text: str) -> str:
        """What the chat template writes after an assistant's turn if the user then says `text`."""
        mark = "*turn*"
        turns = ("user", "-"), ("assistant", mark), ("user", text)
        rendered = self._render([{"role": role, "content": content} for role, content in turns])
        if mark not in rendered:
            raise UserError("the model's chat template leaves out what the assistant says")
        return rendered.partition(mark)[2]

    def _render(self, messages) -> str:
        options = self.chat_template_kwargs
        with one_line("the model's chat template"):  # it is a program of its own
            template = fix_date(self.tokenizer.get_chat_template(), options.get("date"))
            return self.tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True,
                **options)


def fix_date(template: str, day=None) -> str:
    """A chat template that writes `day` (ISO; None: today) where it asks for the date in a format
    that it names: a run that goes on tomorrow then has the prompts of today."""
    day = date.fromisoformat(day) if day else date.today()
    ask = r"strftime_now\(\s*([\"'])(.*?)\1\s*\)"
    return re.sub(ask, lambda match: repr(day.strftime(match[2])), template)
