"""Documents -> token ids, for training, calibration and evaluation alike.

An `Encoder` turns documents of one kind into token ids. Where only some tokens count in the loss,
it also returns a loss mask, with one entry for each token. There are three:

- `TextEncoder` encodes text for training and calibration.
- `HarnessEncoder` encodes text for evaluation, where perplexities are compared with those of
  lm-evaluation-harness.
- `ChatEncoder` encodes chats.

`Encoders` has the encoders of one tokenizer, and picks the one for a source of text. The pairs of
an encoder-decoder are encoded in `pairs.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from gqa.checkpoint.chat_template import MAX_CHARACTERS, ChatRenderer, template_of, variables_of
from gqa.core.errors import RefusedError, TextError, explain
from gqa.corpus.chats import Message, messages_of
from gqa.corpus.sources import Source

# The pattern by which transformers decides whether a template marks what the assistant writes
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN = 60  # how many characters of a chat an error quotes

Span = tuple[int, int]  # a piece of a text: its first character, and the first one after it


class Encoded(NamedTuple):
    """An encoded document.

    Attributes:
        text: What the tokens spell, without special tokens that the encoder adds.
        tokens: Their ids.
        loss_mask: For each token, whether it counts in the loss; None if all count.
    """

    text: str
    tokens: list[int]
    loss_mask: list[bool] | None = None


class Encoder(Protocol):
    """Turns documents of one kind into token ids.

    Attributes:
        start: The token with which this model expects a text to begin; None if there is none.
        starts_documents: Whether encoded documents already begin as the model expects. If not, a
            caller that needs it puts `start` before them.
        masks: Whether encoded documents have a loss mask.
    """

    start: int | None
    starts_documents: bool
    masks: bool

    def encode(self, documents: Sequence[str]) -> list[Encoded]:
        """Encode documents, all at once. Raises TextError and RefusedError."""
        ...

    def beginning(self, text: str, count: int) -> str:
        """The part of the text of an `Encoded` that its first `count` tokens spell."""
        ...

    def identify(self) -> str:
        """A hash of everything that determines the tokens."""
        ...


class TextEncoder:
    """Encodes texts that are packed into blocks: BOS (if the tokenizer adds it), the text, EOS.

    The tokenizers of Llama and Gemma add BOS, those of GPT-2 and Qwen do not. Text that spells a
    special token stays text. Raises TextError if the tokenizer has no EOS token.
    """

    masks = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise TextError(
                "the tokenizer has no EOS token, which is put between documents; set its eos_token"
            )
        self.eos: int = tokenizer.eos_token_id
        bos: int | None = tokenizer.bos_token_id
        self.start = self.eos if bos is None else bos
        self.bos = bos if tokenizer("a")["input_ids"][:1] == [bos] else None
        self.starts_documents = self.bos is not None

    def encode(self, documents: Sequence[str]) -> list[Encoded]:
        """Encode texts, all at once."""
        before = [self.bos] if self.bos is not None else []
        ids_of_texts = self.tokenizer(
            list(documents),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warnings about texts longer than the model's context
        )["input_ids"]
        return [
            Encoded(text, [*before, *ids, self.eos])
            for text, ids in zip(documents, ids_of_texts, strict=True)
        ]

    def beginning(self, text: str, count: int) -> str:
        """The part of a text that its first `count` tokens spell. BOS is one of them, if there is
        one.
        """
        special = 0 if self.bos is None else 1
        text_tokens = max(count - special, 0)
        settings = {"add_special_tokens": False, "split_special_tokens": True}
        return text_of_first_tokens(text, self.tokenizer, text_tokens, **settings)

    def identify(self) -> str:
        """A hash of everything that determines the tokens, without paths and padding settings."""
        return content_hash([tokenizer_content(self.tokenizer), self.bos, self.eos])


class HarnessEncoder:
    """Encodes texts as lm-evaluation-harness does.

    The tokenizer adds its special tokens, and text that spells a special token becomes that token.
    """

    masks = False
    # As there, `start` is put before every text, also before a BOS that the tokenizer adds
    starts_documents = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.start: int | None = start_token(tokenizer)

    def encode(self, documents: Sequence[str]) -> list[Encoded]:
        """Encode texts one after the other."""
        return [
            Encoded(text, self.tokenizer(text, verbose=False)["input_ids"]) for text in documents
        ]

    def beginning(self, text: str, count: int) -> str:
        """The part of a text that its first `count` tokens spell."""
        return text_of_first_tokens(text, self.tokenizer, count)

    def identify(self) -> str:
        """A hash of everything that determines the tokens."""
        return content_hash(["harness", tokenizer_content(self.tokenizer)])


class ChatEncoder:
    """Encodes chats as transformers' `apply_chat_template` does.

    The template writes all special tokens itself, so the tokenizer adds none. Templates are
    rendered in a process of their own; `checkpoint/chat_template.py` says why.

    With `assistant_only_loss` the loss mask is true for the tokens that the assistant writes. They
    are what the template puts between `{% generation %}` marks. A template without such marks is
    rendered for the messages before each turn of the assistant, and again with that turn: what the
    second text has more is what the assistant writes.

    Raises RefusedError if the tokenizer has no chat template, or if with `assistant_only_loss` the
    tokenizer does not say which characters each token covers.
    """

    starts_documents = True

    def __init__(self, tokenizer: Any, name: str, *, assistant_only_loss: bool = False) -> None:
        template = check_template(tokenizer, name)
        if assistant_only_loss and not getattr(tokenizer, "is_fast", False):
            raise RefusedError(
                "--assistant-only-loss needs a fast tokenizer, which knows where its tokens are, "
                f"but that of {name} is {type(tokenizer).__name__}; remove --assistant-only-loss"
            )
        self.tokenizer = tokenizer
        self.name = name
        self.masks = assistant_only_loss
        self.start = start_token(tokenizer)
        self._template = template
        self._has_marks = bool(_GENERATION_MARK.search(template))
        self._renderer = ChatRenderer(template, variables_of(tokenizer))

    def encode(self, documents: Sequence[str]) -> list[Encoded]:
        """Encode chats, each a `chat_text`. Raises TextError and RefusedError."""
        texts = list[str]()
        spans_of_texts = list[list[Span]]()
        for document in documents:
            text, spans = self._rendered(document)
            texts.append(text)
            spans_of_texts.append(spans)

        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=self.masks,
            verbose=False,
        )
        ids_of_texts = encoded["input_ids"]
        if not self.masks:
            return [Encoded(text, ids) for text, ids in zip(texts, ids_of_texts, strict=True)]

        masks = [
            overlapping(offsets, spans)
            for offsets, spans in zip(encoded["offset_mapping"], spans_of_texts, strict=True)
        ]
        return [
            Encoded(text, ids, mask)
            for text, ids, mask in zip(texts, ids_of_texts, masks, strict=True)
        ]

    def beginning(self, text: str, count: int) -> str:
        """The part of a rendered chat that its first `count` tokens spell."""
        return text_of_first_tokens(text, self.tokenizer, count, add_special_tokens=False)

    def identify(self) -> str:
        """A hash of everything that determines the tokens and the mask."""
        from gqa.checkpoint.provenance import versions

        variables = sorted(variables_of(self.tokenizer).items())
        content = [tokenizer_content(self.tokenizer), self._template, variables]
        return content_hash(["chats", content, self.masks, versions("transformers")])

    def _rendered(self, document: str) -> tuple[str, list[Span]]:
        """The text of a chat as the template writes it, and the spans of the text that the
        assistant writes; no spans if there is no loss mask.
        """
        messages = messages_of(document)
        if not self.masks:
            return self._render(messages)["text"], []
        if self._has_marks:
            answer = self._render(messages, mark_assistant=True)
            return answer["text"], [(begin, end) for begin, end in answer["spans"]]
        text = self._render(messages)["text"]
        return text, [*self._assistant_turns(messages, text)]

    def _assistant_turns(self, messages: Sequence[Message], text: str) -> Iterator[Span]:
        """The spans of a rendered chat that the assistant writes, one for each of its turns: from
        the end of the prompt before the turn to the end of the turn.

        Raises RefusedError if the template writes the first messages of a chat in another way when
        more messages follow: then nobody can say where a turn begins and ends. Raises TextError
        if it writes no prompt before a first message of the assistant.
        """
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            with_turn = self._render(messages[: number + 1])["text"]
            if number == 0:
                prompt = self._first_prompt(message, with_turn)
            else:
                prompt = self._render(messages[:number], add_generation_prompt=True)["text"]
            if not with_turn.startswith(prompt) or not text.startswith(with_turn):
                raise RefusedError(
                    f"the chat template of {self.name} formats message {number + 1} of a chat "
                    "differently when other messages follow it, or when it is generated, so it "
                    "does not say which tokens the assistant writes; add {% generation %} "
                    "marks to it, or remove --assistant-only-loss"
                )
            yield len(prompt), self._end_of_turn(with_turn)

    def _first_prompt(self, message: Message, with_turn: str) -> str:
        """What the template writes before the first message of a chat, if the assistant writes it.

        Raises TextError for a template that needs a message, as those that read the first one
        outside of their loop; and for one that begins a chat in another way than a chat without
        messages, as those that write a system prompt in their loop.

        Args:
            message: The first message.
            with_turn: The chat of this message alone, as the template writes it.
        """
        answer = self._renderer.render([], MAX_CHARACTERS, add_generation_prompt=True)
        if "text" not in answer:
            reason = explain(ValueError(answer.get("raised", answer.get("error"))))
        elif not with_turn.startswith(answer["text"]):
            reason = "a chat begins in another way"
        else:
            prompt: str = answer["text"]
            return prompt

        beginning = _beginning_of(message)
        raise TextError(
            f"a chat begins with the assistant ({beginning!r}), and the chat template of "
            f"{self.name} writes no prompt before it ({reason}); add {{% generation %}} marks to "
            "the template, or remove that chat"
        )

    def _end_of_turn(self, text: str) -> int:
        """Where the last turn of a rendered chat ends: white space after a last special token does
        not belong to it, since a model ends its turn with that token.
        """
        without_space = text.rstrip()
        if without_space.endswith(self._special_tokens):
            return len(without_space)
        return len(text)

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        """The special tokens of the tokenizer and the other tokens that were added to its
        vocabulary, except those that are white space.
        """
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        names = [*self.tokenizer.all_special_tokens, *added]
        return tuple(name for name in names if name.strip())

    def _render(self, messages: Sequence[Message], **settings: bool) -> dict[str, Any]:
        """Render messages: the text in `text`, with `mark_assistant` also its `spans`.

        Raises RefusedError if the template cannot be used, TextError if it refuses these
        messages.
        """
        # Templates also write reasoning and calls of tools
        length = sum(len(str(message)) for message in messages)
        answer = self._renderer.render(messages, MAX_CHARACTERS + 2 * length, **settings)

        if "error" in answer:
            raise RefusedError(
                f"the chat template of {self.name} cannot be used: for a chat of {length:,} "
                f"characters {answer['error']}; repair it, or pass a column of text with "
                "--text-column"
            )
        if "raised" in answer:
            beginning = _beginning_of(messages[0])
            reason = explain(ValueError(answer["raised"]))
            raise TextError(
                f"the chat template of {self.name} refuses the chat that begins with "
                f"{beginning!r}: {reason}; repair or remove that chat"
            )
        return answer


def _beginning_of(message: Message) -> str:
    """What errors quote of a message; empty if it has no content, but calls tools."""
    return str(message.get("content", ""))[:_SHOWN]


def check_template(tokenizer: Any, name: str) -> str:
    """The chat template of a model's tokenizer. Raises RefusedError if it has none."""
    template = template_of(tokenizer)
    if template is None:
        raise RefusedError(
            f"the tokenizer of {name} has no chat template, so it cannot read chats; pass a "
            "column of text with --text-column, or copy chat_template.jinja from the Instruct "
            "version of the model"
        )
    return template


class Encoders:
    """The encoders of one tokenizer, one for each kind of document.

    An encoder is made when it is first needed, so what it refuses is refused then.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str = "the model",
        *,
        assistant_only_loss: bool = False,
        text_encoder: Callable[[Any], Encoder] = TextEncoder,
    ) -> None:
        """
        Args:
            tokenizer: Of the model.
            name: What errors call the model.
            assistant_only_loss: Only what the assistant of a chat writes counts in the loss.
            text_encoder: Makes the encoder of plain text from the tokenizer.
        """
        self.tokenizer = tokenizer
        self.name = name
        self._assistant_only_loss = assistant_only_loss
        self._text_encoder = text_encoder

    @cached_property
    def text(self) -> Encoder:
        """The encoder of plain text."""
        return self._text_encoder(self.tokenizer)

    @cached_property
    def chats(self) -> Encoder:
        """The encoder of chats."""
        return ChatEncoder(self.tokenizer, self.name, assistant_only_loss=self._assistant_only_loss)

    def of(self, source: Source) -> Encoder:
        """The encoder for the documents of a source.

        Raises RefusedError and TextError.
        """
        if source.has_chats:
            return self.chats
        if self._assistant_only_loss:
            raise RefusedError(
                "--assistant-only-loss needs chats in a column messages or conversations, but "
                f"{source.spec} has text; remove --assistant-only-loss"
            )
        return self.text


def overlapping(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """For each token, whether it overlaps one of the spans, as transformers decides it.

    Args:
        offsets: The characters of each token, in the order of the text.
        spans: Pieces of the same text, in its order.
    """
    mask = [False] * len(offsets)
    number = 0
    for token, (begin, end) in enumerate(offsets):
        while number < len(spans) and begin >= spans[number][1]:
            number += 1
        if number == len(spans):
            break
        mask[token] = end > spans[number][0]
    return mask


def start_token(tokenizer: Any) -> int | None:
    """BOS, or else EOS; None if the tokenizer has neither."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return None


def text_of_first_tokens(text: str, tokenizer: Any, count: int, **settings: Any) -> str:
    """The part of a text that its first `count` tokens cover, in the text's own characters.

    Decoding the tokens would return other characters: a tokenizer without a decoder puts spaces
    between tokens, others change white space. A slow tokenizer does not say which characters a
    token covers: there the same share of the characters is taken.

    Args:
        text: The whole text.
        tokenizer: A tokenizer of transformers.
        count: How many tokens.
        settings: Passed to the tokenizer with the text.
    """
    if not getattr(tokenizer, "is_fast", False):
        total = len(tokenizer(text, verbose=False, **settings)["input_ids"])
        return text[: round(len(text) * count / total)]

    encoded = tokenizer(text, verbose=False, return_offsets_mapping=True, **settings)
    offsets = encoded["offset_mapping"]
    # Special tokens have the offsets (0, 0), wherever they are: hence not the last end, but the
    # largest.
    return text[: max((end for _, end in offsets[:count]), default=0)]


def tokenizer_content(tokenizer: Any) -> Any:
    """Everything that determines how a tokenizer splits text, JSON-ready.

    Paths, truncation and padding are left out.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content.pop("truncation", None)
        content.pop("padding", None)
        return content

    settings = list[tuple[str, bool]]()
    for name, value in sorted(tokenizer.init_kwargs.items()):
        if isinstance(value, bool) and name not in ("is_local", "local_files_only"):
            settings.append((name, value))

    # The files also have merges or scores, which get_vocab() does not return
    with TemporaryDirectory() as directory:
        tokenizer.save_vocabulary(directory)
        files = [file.read_bytes().hex() for file in sorted(Path(directory).iterdir())]
    return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), settings, files]


def content_hash(content: Any) -> str:
    """SHA-256 of something that is JSON-ready."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
