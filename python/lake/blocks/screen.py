"""Which lines of a block a parser may take: what is odd about a line as bytes is left to Spark's rules."""

from __future__ import annotations

import re

import numpy as np

from headrace.lake.blocks.lines import BLANK, BOM, NEWLINE, TAB, Block, Mask

_OPEN, _CLOSE = ord("{"), ord("}")
#: Jackson limits the digits of a number (those of its fraction and exponent too) and the depth of an object; lines
#: shorter than the first reach neither. The last is the limit of a text.
_LONG, _DIGITS, _MOST_DEPTH, _MOST_TEXT = 900, re.compile(rb"[0-9.eE+-]+"), 400, 20_000_000
_NOT_FINITE = re.compile(rb"[:,\[] *[-+]?(?:NaN|Inf)")
_NUL = b"\\u0000"
#: A second half of a surrogate pair without its first one.
_LONE = re.compile(rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]")


def odd_bytes(block: Block) -> Mask:
    """Lines that are not UTF-8, have control characters (tabs and carriage returns at the end aside), begin with a byte
    order mark, begin and end with a blank, or are too long. bool [lines].
    """
    if block.too_long:
        return np.ones(len(block), np.bool_)
    odd = np.zeros(len(block), np.bool_)
    data, ends = block.bytes, block.ends
    returns = int((block.newlines - ends).sum())
    control = block.control_characters
    if control.all != len(block) + control.tabs + returns:
        strange = np.flatnonzero((data < BLANK) & (data != NEWLINE) & (data != TAB))
        lines = block.line_of(strange)
        odd[lines[strange < ends[lines]]] = True
    if returns and int((block.newlines - ends).max()) > 1:
        odd |= block.newlines - ends > 1
    if not block.data.isascii():
        for i in _not_utf8(block):
            odd[i] = True
        last = len(data) - 1
        odd |= np.all([data[np.minimum(block.starts + k, last)] == sign for k, sign in enumerate(BOM)], axis=0)
    odd |= (ends > block.starts) & (data[block.starts] == BLANK) & (data[ends - 1] == BLANK)
    return odd


def odd_json(block: Block) -> Mask:
    """Lines that are not `{...}` from their first byte to their last, such that JSON parsers differ about, and such
    with a NUL character as JSON spells it. bool [lines].
    """
    data, starts, ends = block.bytes, block.starts, block.ends
    odd: Mask = (data[starts] != _OPEN) | (data[np.maximum(ends - 1, 0)] != _CLOSE) | (ends == starts)
    for pattern, sign in ((_NOT_FINITE, b"NaN"), (_NOT_FINITE, b"Inf"), (_LONE, b"\\ud"), (_LONE, b"\\uD")):
        if _has(block, sign):
            places = np.array([m.end() - 1 for m in pattern.finditer(block.data)], np.int64)
            odd[block.line_of(places)] = True
    if _has(block, _NUL):
        places = np.array([m.start() for m in re.finditer(re.escape(_NUL), block.data)], np.int64)
        odd[block.line_of(places)] = True
    for i in np.flatnonzero(ends - starts > _LONG).tolist():
        line = block.data[starts[i] : ends[i]]
        deep = line.count(b"{") + line.count(b"[") > _MOST_DEPTH
        odd[i] |= deep or len(line) > _MOST_TEXT or max(map(len, _DIGITS.findall(line)), default=0) >= _LONG
    return odd


def _has(block: Block, text: bytes) -> bool:
    """Whether a text is in the block: as `in` says, several times as fast where its first byte is rare."""
    if text[:1] not in block.data:
        return False
    at = np.flatnonzero(block.bytes[: 1 - len(text)] == text[0])
    for k, sign in enumerate(text[1:], 1):
        at = at[block.bytes[at + k] == sign]
    return len(at) > 0


def _not_utf8(block: Block) -> list[int]:
    try:
        block.data.decode()
    except UnicodeDecodeError:
        pass
    else:
        return []
    lines = np.unique(block.line_of(np.flatnonzero(block.bytes > 127)))
    found = []
    for i in lines.tolist():
        try:
            block.data[block.starts[i] : block.ends[i]].decode()
        except UnicodeDecodeError:
            found.append(i)
    return found
