"""Documents -> token ids, for training, calibration and evaluation alike.

An `Encoder` turns documents of one kind into token ids, and if not all of them count in the loss,
into a loss mask with one entry per token. Text is encoded by a `TextEncoder` (in an evaluation by a
`HarnessEncoder`, as its perplexities are compared with those of other tools), chats by a
`ChatEncoder`; `Encoders` has those of one tokenizer. Pairs are encoded in `pairs.py`.
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

from gqa.checkpoint.chat_template import CHARACTERS, ChatRenderer, template_of, variables_of
from gqa.core.errors import CorpusError, RefusedError, explain
from gqa.corpus.chats import Message, messages_of
from gqa.corpus.sources import Source

# As transformers looks for it
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN = 60  # characters of a chat in errors

Span = tuple[int, int]  # characters from `begin` to before `end`


class Encoded(NamedTuple):
    """A document: what its tokens spell, their ids, and which of them count in the loss; None if
    all do.
    """

    text: str
    tokens: list[int]
    loss_mask: list[bool] | None = None


class Encoder(Protocol):
    """Turns documents of one kind into token ids.

    start: the token with which texts begin for this model; None if it has none. starts_documents:
    whether documents begin with what they should begin with, so that nobody need put `start` before
    them. masks: whether documents have a loss mask.
    """

    start: int | None
    starts_documents: bool
    masks: bool

    def encode(self, documents: Sequence[str]) -> list[Encoded]:
        """Encode documents, all at once. Raises CorpusError and RefusedError."""
        ...

    def beginning(self, text: str, count: int) -> str:
        """The beginning of the text of an `Encoded` that its first `count` tokens spell."""
        ...

    def identify(self) -> str:
        """A hash of everything that determines the tokens."""
        ...


class TextEncoder:
    """Encodes texts as they are packed into blocks: BOS (if the tokenizer adds one), text, EOS.

    BOS is added if the tokenizer adds it by default, as for Llama and Gemma, but not GPT-2 and
    Qwen. Text that spells a special token stays text. Raises CorpusError if the tokenizer has no
    EOS token.
    """

    masks = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise CorpusError(
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
        """The beginning of a text that the first `count` tokens spell, of which BOS is one."""
        of_text = max(count - (self.bos is not None), 0)
        settings = {"add_special_tokens": False, "split_special_tokens": True}
        return text_of_first_tokens(text, self.tokenizer, of_text, **settings)

    def identify(self) -> str:
        """A hash of everything that determines the tokens, without paths and padding settings."""
        return _hash([tokenizer_content(self.tokenizer), self.bos, self.eos])


class HarnessEncoder:
    """Encodes texts as lm-evaluation-harness does: with the special tokens that the tokenizer adds,
    and text that spells a special token is that token.
    """

    masks = False
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
        """The beginning of a text that the first `count` tokens spell."""
        return text_of_first_tokens(text, self.tokenizer, count)

    def identify(self) -> str:
        """A hash of everything that determines the tokens."""
        return _hash(["harness", tokenizer_content(self.tokenizer)])


class ChatEncoder:
    """Encodes chats as transformers' `apply_chat_template` does.

    The template writes all special tokens itself, so none is added. It is rendered in a process of
    its own, as `chat_template.py` explains.

    With `assistant_only_loss` the loss mask is true for what the model would have to write: by the
    `{% generation %}` marks of the template, or if it has none, by comparing what the template
    writes for the beginnings of a chat.

    Raises RefusedError if the tokenizer has no chat template, or with `assistant_only_loss` does
    not know where its tokens are in a text.
    """

    starts_documents = True

    def __init__(self, tokenizer: Any, name: str, *, assistant_only_loss: bool = False) -> None:
        template = check_template(tokenizer, name)
        if assistant_only_loss and not getattr(tokenizer, "is_fast", False):
            raise RefusedError(
                f"--assistant-only-loss needs a fast tokenizer, which knows where its tokens are; "
                f"that of {name} is {type(tokenizer).__name__}: leave it out"
            )
        self.tokenizer = tokenizer
        self.name = name
        self.masks = assistant_only_loss
        self.start = start_token(tokenizer)
        self._template = template
        self._has_marks = bool(_GENERATION_MARK.search(template))
        self._renderer = ChatRenderer(template, variables_of(tokenizer))

    def encode(self, documents: Sequence[str]) -> list[Encoded]:
        """Encode chats, each a `chat_text`. Raises CorpusError and RefusedError."""
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
        """The beginning of a rendered chat that the first `count` tokens spell."""
        return text_of_first_tokens(text, self.tokenizer, count, add_special_tokens=False)

    def identify(self) -> str:
        """A hash of everything that determines the tokens and the mask."""
        from gqa.checkpoint.provenance import versions

        variables = sorted(variables_of(self.tokenizer).items())
        content = [tokenizer_content(self.tokenizer), self._template, variables]
        return _hash(["chats", content, self.masks, versions("transformers")])

    def _rendered(self, document: str) -> tuple[str, list[Span]]:
        """A chat as the template writes it, and what the assistant writes of it (only if it is
        asked for).
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
        """What the assistant writes in a rendered chat: from the end of the prompt before each of
        its turns to the end of the turn.

        Raises RefusedError if a rendered chat does not begin as its beginning is rendered.
        """
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], add_generation_prompt=True)["text"]
            with_turn = self._render(messages[: number + 1])["text"]
            if not with_turn.startswith(prompt) or not text.startswith(with_turn):
                raise RefusedError(
                    f"the chat template of {self.name} writes message {number + 1} of a chat in "
                    "another way if other messages follow it or if it is to be generated, so it "
                    "does not say which tokens the assistant writes; add {% generation %} marks to "
                    "it, or leave out --assistant-only-loss"
                )
            yield len(prompt), self._end_of_turn(with_turn)

    def _end_of_turn(self, text: str) -> int:
        """The length of a chat without the white space after its last special token: a model ends
        its turn with that token and writes nothing after it.
        """
        without_space = text.rstrip()
        if without_space.endswith(self._special_tokens):
            return len(without_space)
        return len(text)

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        """Special tokens, and others that are added to the vocabulary, but white space."""
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        names = [*self.tokenizer.all_special_tokens, *added]
        return tuple(name for name in names if name.strip())

    def _render(self, messages: Sequence[Message], **settings: bool) -> dict[str, Any]:
        """What the template writes. Raises RefusedError and CorpusError."""
        length = sum(len(str(message.get("content", ""))) for message in messages)
        answer = self._renderer.render(messages, CHARACTERS + 2 * length, **settings)

        if "error" in answer:
            raise RefusedError(
                f"the chat template of {self.name} cannot be used: for a chat of {length:,} "
                f"characters {answer['error']}; repair it, or name a column of text with --field"
            )
        if "raised" in answer:
            beginning = ""
            if messages:
                beginning = str(messages[0].get("content", ""))[:_SHOWN]
            reason = explain(ValueError(answer["raised"]))
            raise CorpusError(
                f"the chat template of {self.name} refuses the chat that begins with "
                f"{beginning!r}: {reason}; repair or remove that chat"
            )
        return answer


def check_template(tokenizer: Any, name: str) -> str:
    """The chat template of a model's tokenizer. Raises RefusedError if it has none."""
    template = template_of(tokenizer)
    if template is None:
        raise RefusedError(
            f"the tokenizer of {name} has no chat template, so it cannot read chats; name a column "
            "of text with --field, or add the chat_template.jinja of its base model"
        )
    return template


class Encoders:
    """The encoders of one tokenizer, by kind of document; `name` is that of the model.

    `text_encoder`: how plain text is encoded. Raises what the encoders raise, when one of them is
    needed.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str = "the model",
        *,
        assistant_only_loss: bool = False,
        text_encoder: Callable[[Any], Encoder] = TextEncoder,
    ) -> None:
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
        """The encoder of the documents of a source. Raises RefusedError and CorpusError."""
        if source.chats:
            return self.chats
        if self._assistant_only_loss:
            raise RefusedError(
                f"--assistant-only-loss needs chats, a column messages or conversations; "
                f"{source.spec} has text: leave it out"
            )
        return self.text


def overlapping(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token overlaps one of the spans of characters, as transformers decides it; both
    are in order.
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
    """The beginning of a text that its first `count` tokens cover, in the text's own characters;
    `settings`: of the tokenizer's call.

    Decoded tokens would not do: a tokenizer without a decoder puts spaces between them, others
    change white space. Tokenizers in Python know no positions: then it is the same share of the
    characters.
    """
    if not getattr(tokenizer, "is_fast", False):
        total = len(tokenizer(text, verbose=False, **settings)["input_ids"])
        return text[: round(len(text) * count / total)]

    encoded = tokenizer(text, verbose=False, return_offsets_mapping=True, **settings)
    offsets = encoded["offset_mapping"]
    # Special tokens have the offsets (0, 0), also in the middle.
    return text[: max((end for _, end in offsets[:count]), default=0)]


def tokenizer_content(tokenizer: Any) -> Any:
    """What determines how a tokenizer splits text, JSON-ready, without paths and padding
    settings.
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

    # The files also have merges or scores, get_vocab() does not
    with TemporaryDirectory() as directory:
        tokenizer.save_vocabulary(directory)
        files = [file.read_bytes().hex() for file in sorted(Path(directory).iterdir())]
    return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), settings, files]


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
