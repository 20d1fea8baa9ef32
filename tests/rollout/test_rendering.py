from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from forge_async.errors import DataError
from forge_async.model_zoo import byte_tokenizer
from forge_async.rollout.config import Example
from forge_async.rollout.rendering import build_messages, render_prompt

USER = {"role": "user", "content": "1 + 1 ="}
SMOLLM2_LIKE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_of(tokenizer, messages) -> str:
    return tokenizer.decode(render_prompt(tokenizer, messages))


def test_system_prompt_none_leaves_the_templates_default_and_empty_replaces_it():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SMOLLM2_LIKE
    assert text_of(tokenizer, build_messages("1 + 1 =", None)).startswith(
        "<|im_start|>system\nYou are helpful.<|im_end|>\n"
    )
    assert text_of(tokenizer, build_messages("1 + 1 =", "")) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Add." in text_of(tokenizer, build_messages("1 + 1 =", "Add."))


def test_examples_stand_between_system_message_and_prompt():
    examples = [Example("2 + 3 =", "5"), Example("4 - 1 =", "3")]
    roles = [(m["role"], m["content"]) for m in build_messages("1 + 1 =", "", examples)]
    assert roles == [
        ("system", ""),
        ("user", "2 + 3 ="),
        ("assistant", "5"),
        ("user", "4 - 1 ="),
        ("assistant", "3"),
        ("user", "1 + 1 ="),
    ]
    assert build_messages("1 + 1 =", None) == (USER,)


def test_a_conversation_keeps_its_own_system_message():
    own = {"role": "system", "content": "own"}
    assert build_messages([own, USER], "other", [Example("a", "b")]) == (
        own,
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        USER,
    )
    assert build_messages([USER], "other") == ({"role": "system", "content": "other"}, USER)


def test_a_bos_of_template_and_tokenizer_comes_once():
    """A tokenizer that adds BOS to every text, with a template that writes it, too."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 1)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert tokenizer("x")["input_ids"][0] == 1
    ids = render_prompt(tokenizer, [USER]).tolist()
    assert ids.count(1) == 1 and ids[0] == 1


def test_ids_equal_transformers_own_rendering(tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    expected = tokenizer.apply_chat_template([USER], tokenize=True, add_generation_prompt=True, return_dict=True)
    ids = render_prompt(tokenizer, [USER])
    assert ids.tolist() == expected["input_ids"] and ids.dtype == "int32"


def test_a_missing_or_refusing_template_is_a_data_error():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(DataError, match="no system role here"):
        render_prompt(tokenizer, [USER])
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        render_prompt(tokenizer, [USER])
