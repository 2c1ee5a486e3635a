"""Sentences for calibration on speech: chosen words in simple forms, none of them one that anybody is asked."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

_WORDS = {
    "form": """{who} {did} {what} {where}. | {when} {who} {did} {what}. | {who} {did} {what}, but {who} {did}
{what}. | why is {what} {where}? | {who} said that {what} was {is}. | it is too {is} to {to} {where}. | {who} {did}
{what} and went to {to}. | did you know that {who} {did} {what} {when}? | there is {what} {where}, and it looks
{is}. | {what} was {where} when {who} came back. | you should {to} before {who} can {to}. | {who} had {what} and
{what}, which were {is}. | if it is {is}, we will {to} {where}. | I think {who} {did} {what} because it was {is}. |
{number} people tried to {to} {when}. | please do not {to} {where}, it is {is}. | {who} is {is}, and {who} is {is}.
| how can {who} {to} without {what}?""",
    "who": """the farmer | my aunt | a young pilot | the director | our neighbours | the singer | an old sailor |
the mayor | two students | her cousin | the mechanic | a tall stranger | the lawyer | his daughter | the gardener |
everyone in the office | a police officer | the twins | Dr. Green | Mr. Brown | Susan | Peter | the new manager |
some tourists | the waiter | a famous painter | the postman | our captain | nobody | the scientist""",
    "did": """sold | carried | lost | found | cleaned | borrowed | described | hid | wrapped | photographed |
dropped | ordered | forgot | noticed | collected | delivered | returned | examined | bought | needed | wanted |
liked | kept | threw away | asked for | looked for | talked about | paid for | took | brought""",
    "what": """a wooden box | the yellow umbrella | seven eggs | an expensive camera | the broken radio | both
tickets | a glass of milk | the heavy suitcase | some fresh bread | a silver ring | the wrong address | his winter
coat | a pair of shoes | twelve roses | the last piece of cake | a long letter | the green bicycle | an empty bottle
| her favourite song | the newspaper | a bag of potatoes | the computer | eleven dollars | a cup of tea | the
photographs | an orange blanket | the answer | a secret plan | the old piano | a dozen oranges""",
    "where": """near the harbour | behind the school | at the hotel | on the roof | in the forest | under the stairs
| next to the bank | across the street | in a small restaurant | at the airport | outside the theatre | by the lake
| in the kitchen | between the trees | on the island | at the hospital | around the corner | inside the castle | in
New York | along the beach""",
    "when": """on Monday | last autumn | before sunrise | after lunch | in nineteen ninety five | yesterday
afternoon | every Saturday | at half past six | during the war | three years ago | around midnight | in early April
| on her birthday | as usual | for the first time | at the weekend | this morning | a week later | in the year two
thousand | on the second day""",
    "to": """swim | sing | drive home | read aloud | speak Spanish | cook dinner | answer the phone | travel alone |
sleep | wait any longer | play chess | climb the tower | learn mathematics | follow the river | make a decision |
write poems | feed the horses | pay the bill | plant a tree | build a fire""",
    "number": """two | four | six | eight | nine | thirteen | fifteen | twenty | thirty one | forty | a hundred |
five hundred | a thousand | many | few""",
    "is": """cheap | dangerous | quiet | beautiful | difficult | strange | warm | dirty | famous | impossible |
useful | thick | soft | important | ready | full | narrow | bright | honest | tired | hungry | careful | afraid |
certain | possible""",
}
_CHOICES = {name: " ".join(words.split()).split(" | ") for name, words in _WORDS.items()}


def sentences(seed: int = 0) -> Iterator[str]:
    """One after another, each once."""
    generator, said = random.Random(seed), set[str]()
    while True:
        made = re.sub(
            r"\{(\w+)\}", lambda slot: generator.choice(_CHOICES[slot[1]]), generator.choice(_CHOICES["form"])
        )
        if made not in said:
            said.add(made)
            yield made[0].upper() + made[1:]


def texts(count: int, longest: int = 4) -> list[str]:
    """Of one sentence to `longest`, which Whisper hears at once; as many of each length."""
    found = sentences()
    return [" ".join(next(found) for _ in range(1 + number * longest // count)) for number in range(count)]
