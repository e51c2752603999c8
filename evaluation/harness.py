"""Language models for the LM evaluation harness (the package `lm_eval`)."""

import json
from collections.abc import Sequence
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from lineage.configs.atomic import check_output, write_output
from lineage.data.content import padded
from lineage.evaluation.likelihood import LanguageModel
from lineage.models.decoding.generate import generate

SETTINGS = ("temperature", "top_k", "top_p", "num_beams", "repetition_penalty")  # of a task, for generation


def evaluate(
    model: LanguageModel,
    tasks: Sequence[str],
    output: str = "",
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
) -> str:
    """Return a table of the scores of a model for tasks of the harness, given by name.

    Args:
        output: JSON file to write with the scores, the versions and the settings; "": none.
        limit: number of examples of each task; None: all.
        num_fewshot: number of solved examples before each question; None: as set by the task.
        include_path: folder with the .yaml files of additional tasks.

    Raises:
        ValueError: a task is unknown, the limit is 0, or the output is not a file.
    """
    check_output(output)  # before the computation
    if limit == 0:
        raise ValueError("--limit is 0: it must be at least 1.")
    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise ValueError(f"The harness has no task {unknown[0]!r}.")
    results = lm_eval.simple_evaluate(
        Harness(model), tasks=[*tasks], limit=limit, num_fewshot=num_fewshot, task_manager=manager, log_samples=False
    )
    if output:
        write_output(output, json.dumps(results, indent=2, default=handle_non_serializable))
    return make_table(results)


class Harness(TemplateLM):
    """Model for `lm_eval.simple_evaluate`, which computes the likelihoods and texts requested by a task."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        if model.tokenizer.end_of_text is None:
            raise ValueError("The tokenizer has no end of text, which the tasks of the harness need.")
        self.language_model = model

    @property
    def eot_token_id(self) -> int:
        return self.language_model.tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        return self.language_model.start

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        model = self.language_model
        return (model.tokenizer if add_special_tokens is False else model).encode(string).tolist()

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [(np.array(context), np.array(continuation)) for _, context, continuation in requests]
        return [(likelihood.log, likelihood.is_greedy) for likelihood in self.language_model.of_tokens(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        return [likelihood.log for likelihood in self.language_model.of_texts(texts)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to the first of the texts `until`, in batches of contexts of similar length.

        An empty context becomes the token before texts. Samples are drawn if the task sets `do_sample` or a
        `temperature` above 0. A text also ends with any token that ends a text of the model. Special tokens are
        omitted.

        Raises:
            ValueError: a task sets another option than `SETTINGS` and those of `normalize_gen_kwargs`, or has no room
                for a context.
        """
        pairs, encode = [request.args for request in requests], self.language_model.encode
        order = Collator(pairs, lambda pair: len(encode(pair[0])), group_by="gen_kwargs")
        texts: list[str] = []
        for batch in order.get_batched(self.language_model.batch_size):
            settings = normalize_gen_kwargs(batch[0][1])
            texts += self._continued([encode(context) for context, _ in batch], len(texts), **settings)
        return order.get_original(texts)

    def _continued(self, contexts, first_index, *, until, max_gen_toks, do_sample, temperature=1.0, **others):
        model = self.language_model
        if unknown := others.keys() - {*SETTINGS}:
            known = ", ".join(("until", "max_gen_toks", "do_sample", *SETTINGS))
            raise ValueError(f"generation_kwargs has {min(unknown)!r}: it may have {known}.")
        if (room := model.length - max_gen_toks) < 1:
            raise ValueError(f"max_gen_toks is {max_gen_toks}: it must be below the maximum length, {model.length}.")
        contexts = [tokens[-room:] if len(tokens) else np.array([self.prefix_token_id]) for tokens in contexts]
        lengths = np.array([len(tokens) for tokens in contexts])
        tokenizer, ends = model.tokenizer, [*until, model.tokenizer.decode([self.eot_token_id])]
        options = others | {"temperature": temperature if do_sample else 0.0, "excluded_tokens": tokenizer.excluded}
        options |= {"max_new_tokens": max_gen_toks, "first_index": first_index, "stop_tokens": tokenizer.ends}
        out = generate(model.model, model.variables, padded(contexts, lengths.max()), lengths, **options)
        rows = zip(np.asarray(out.tokens), lengths, np.asarray(out.lengths))
        return [_text(tokenizer, tokens[start:stop], ends) for tokens, start, stop in rows]


def _text(tokenizer, tokens, ends):
    """Return the text of tokens before the first of the texts `ends`, which may be special tokens; omit the others."""

    def ended(count):
        text = tokenizer.decode(tokens[:count])
        return any(end in text for end in ends if end)

    if ended(len(tokens)):
        tokens = tokens[: next(filter(ended, range(1, len(tokens) + 1)))]
    return postprocess_generated_text(tokenizer.decode(tokens[~tokenizer.special[tokens]]), ends, None)
