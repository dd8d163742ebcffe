"""What one would write with the peft library: one base model, adapters that are switched, a loop of torch's own parts.

It gets every advantage that costs its author nothing: rows of one length (no padding), logits of the loss tokens alone,
the same size of passes. Loss (AIPO), reports, clipping and AdamW are those of our runs, in torch's own operations.
`PeftTexts` learns texts as the loops of transformers do: each batch padded to its longest, and the model's own loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from benchmarks.trainer_step import ALPHA, LR, MAX_NORM, MAX_TOKENS, RANK, bench_model
from prime_rl.configs.base import DEFAULT_TARGET_MODULES
from prime_rl.contract.types import TOKEN_BYTES, SampleColumns
from prime_rl.trainer.fair_queue import Row, rows_of, to_micro_batch
from prime_rl.trainer.step import Rows

DELTA = 8.0
# A label that has no loss.
IGNORED = -100


class PeftTrainer:
    """`num_adapters` peft adapters over one base, each with its AdamW; `base` is the small model when none is given."""

    def __init__(
        self,
        num_adapters: int,
        base: PreTrainedModel | None = None,
        rank: int = RANK,
        checkpoints: bool = False,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        base = bench_model() if base is None else base
        config = LoraConfig(
            r=rank, lora_alpha=ALPHA, target_modules=list(DEFAULT_TARGET_MODULES), task_type="CAUSAL_LM"
        )
        if checkpoints:
            base.train()  # without it transformers checkpoints nothing; no layer of these models has dropout
            base.gradient_checkpointing_enable({"use_reentrant": False})
            base.enable_input_require_grads()
        self._max_tokens = max_tokens
        self._device = torch.device(base.device)
        # Products of the float32 adapters of a base in 16 bits are in 16 bits too, as ours.
        self._autocast = {"dtype": torch.bfloat16, "enabled": base.dtype == torch.bfloat16}
        self._model = get_peft_model(base, config, adapter_name="0")
        for number in range(1, num_adapters):
            self._model.add_adapter(str(number), config)
        self._params = []
        for number in range(num_adapters):
            named = [p for name, p in self._model.named_parameters() if f".{number}." in name.partition("lora_")[2]]
            self._params.append(named)
        self._optimizers = [torch.optim.AdamW(params, lr=LR, weight_decay=0.0) for params in self._params]

    def step_one(self, batches: Sequence[Sequence[SampleColumns]]) -> None:
        """All samples on the first adapter."""
        self._step(0, [sample for samples in batches for sample in samples])

    def step_sequential(self, batches: Sequence[Sequence[SampleColumns]]) -> None:
        """Each batch on its own adapter, one after another."""
        for number, samples in enumerate(batches):
            self._step(number, samples)

    def _step(self, number: int, samples: Sequence[SampleColumns]) -> None:
        self._model.set_adapter(str(number))
        rows = rows_of(0, samples)
        per_pass = max(1, self._max_tokens // rows[0].num_tokens)
        for start in range(0, len(rows), per_pass):
            self._pass(rows[start : start + per_pass])
        torch.nn.utils.clip_grad_norm_(self._params[number], MAX_NORM)
        self._optimizers[number].step()
        self._optimizers[number].zero_grad()

    def _pass(self, rows: Sequence[Row]) -> None:
        batch = Rows.of(to_micro_batch(rows))
        ids_RT, columns_K, mask_RK, mu_RK, advantages_R1, temperatures_R, scales_R = (
            torch.from_numpy(array).to(self._device)
            for array in (
                batch.token_ids_RT,
                batch.columns_K,
                batch.mask_RK,
                batch.sampled_logprobs_RK,
                batch.advantages_RK,
                batch.temperatures_R,
                batch.scales_R,
            )
        )
        with torch.autocast(self._device.type, **self._autocast):
            logits_RKV = self._model(input_ids=ids_RT, use_cache=False, logits_to_keep=columns_K - 1).logits
        all_logprobs_RKV = torch.log_softmax(logits_RKV.float() / temperatures_R[:, None, None], dim=-1)
        logprobs_RK = all_logprobs_RKV.gather(-1, ids_RT[:, columns_K][..., None]).squeeze(-1)
        ratio_RK = (logprobs_RK.detach() - mu_RK).exp()
        weight_RK = ratio_RK.clamp(max=DELTA) * (advantages_R1 * scales_R[:, None]) * mask_RK
        loss = -(weight_RK * logprobs_RK).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            entropy_RK = -(all_logprobs_RKV.exp() * all_logprobs_RKV).sum(-1)
            mismatch_RK = ratio_RK - 1 - ratio_RK.log()
            reports = [
                loss,
                *((x * mask_RK).sum() for x in (ratio_RK, entropy_RK, mismatch_RK, ratio_RK > DELTA)),
            ]
            self.last_reports = [float(report) for report in reports]


class PeftTexts(PeftTrainer):
    """The same with texts of any lengths."""

    def _pass(self, rows: Sequence[Row]) -> None:
        ids_RT, mask_RT = (
            pad_sequence([torch.frombuffer(bytearray(data), dtype=dtype) for data in cut], batch_first=True).long()
            for dtype, cut in (
                (torch.int32, [row.sample.token_ids[: row.num_tokens * TOKEN_BYTES] for row in rows]),
                (torch.uint8, [row.sample.loss_mask[: row.num_tokens] for row in rows]),
            )
        )
        lens_R = torch.tensor([row.num_tokens for row in rows])
        attended_RT = torch.arange(ids_RT.shape[1]) < lens_R[:, None]
        labels_RT = ids_RT.where(mask_RT > 0, IGNORED)
        loss = self._model(input_ids=ids_RT, attention_mask=attended_RT, labels=labels_RT, use_cache=False).loss
        loss.backward()
        self.last_reports = [float(loss.detach())]
