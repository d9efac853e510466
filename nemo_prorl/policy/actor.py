"""The actor: NeMo-Aligner's Megatron model with log-probabilities, updates, weight export and the reference policy.

Shape suffixes: B responses of a (micro-)batch, T token positions, H hidden size, V rows of the output weight,
N response tokens (in a packed micro-batch: tokens of all its sequences), P tokens that predict a response token,
K values per token (log-probability, entropy).
The log-probability at position t is that of token t given the tokens before t, under softmax(logits / temperature).
"""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from nemo.collections.nlp.parts.mixins.nlp_adapter_mixins import NLPAdapterModelMixin
from nemo_aligner.utils.train_utils import grad_reductions, prepare_for_training_step, set_eval, set_sync_funcs
from torch import Tensor

from nemo_prorl import device
from nemo_prorl.algorithms.digests import digest, named
from nemo_prorl.algorithms.logprobs import chunked_logprobs
from nemo_prorl.batch import Batch
from nemo_prorl.errors import NonFiniteUpdate
from nemo_prorl.micro_batches import Limits
from nemo_prorl.policy.data_ranks import DataRanks, merge_sums
from nemo_prorl.policy.packing import PackedBatch
from nemo_prorl.policy.reference import Reference
from nemo_prorl.policy.weights import Shape, sha256_of
from nemo_prorl.policy.whole_weights import WholeWeights
from nemo_prorl.sizing.widths import width_multiple

_log = logging.getLogger(__name__)

_Micro = tuple[Batch, PackedBatch | None]  # a micro-batch; its packed form, None where micro-batches are padded
_Finish = Callable[[_Micro, Tensor], Any]
# (logp_BT, entropy_BT or None, micro-batch, denominator) -> (loss / denominator, sums to report)
LossFunction = Callable[[Tensor, Tensor | None, Batch, float], tuple[Tensor, dict[str, Tensor]]]


def _last_hidden_states(hidden_SBH: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
    return hidden_SBH, None


_MOMENTS = "exp_avg", "exp_avg_sq"  # of Adam, torch's and Transformer Engine's


class ActorModel(NLPAdapterModelMixin, MegatronGPTModel):
    """NeMo's GPT model whose output is the last hidden states; the loss applies the output weight itself, in chunks."""

    def model_provider_func(self, pre_process: bool, post_process: bool) -> torch.nn.Module:
        model = super().model_provider_func(pre_process, post_process)
        if post_process:
            model.output_layer.forward = _last_hidden_states
        return model

    def _enable_nvidia_optimizations(self) -> None:
        if device.has_gpu():
            super()._enable_nvidia_optimizations()

    def setup_transformer_engine_cp_groups(self) -> None:
        if self.cfg.get("transformer_engine", False) and device.has_gpu():
            super().setup_transformer_engine_cp_groups()


class Actor:
    """This rank's part of the policy, its optimizer and its reference policy, at any parallel layout.

    Every method that computes is a collective: all ranks call it, each with the rows of its data rank.
    """

    def __init__(
        self,
        model: ActorModel,
        optimizer: Any,
        temperature: float,
        hf_config: dict,
        chunk: tuple[int, int],
        float32_head: bool = True,
    ) -> None:
        """Wrap a built model and its optimizer, and reset the optimizer.

        Args:
            hf_config: the model's Hugging Face config.json.
            chunk: (tokens, vocabulary words) whose logits are in memory at a time.
            float32_head: keep the logits of 16-bit weights in float32.
        """
        self.model, self.optimizer, self.temperature, self._chunk = model, optimizer, temperature, chunk
        self._float32_head = float32_head
        self.hf_config = hf_config
        self.shape = Shape.of(hf_config, int(model.cfg.override_vocab_size))
        rows, tokens = int(model.cfg.micro_batch_size), model.cfg.get("micro_batch_tokens")
        self.limits = Limits(rows, tokens, width_multiple(model.cfg), bool(model.cfg.get("packed_sequences")))
        self._shapes: set[tuple[bool, torch.Size]] = set()  # (forward only, shape) of each micro-batch so far
        # FP8's scales of earlier updates are a state of modules beside their parameters, which a checkpoint needs.
        self.keeps_scales = bool(model.cfg.get("fp8")) and model.cfg.get("fp8_recipe") == "delayed"
        self._share_prompts = not model.cfg.get("transformer_engine")  # only CausalAttention handles shared prompts
        self.data_ranks = DataRanks(self._device())
        self.whole_weights = WholeWeights(self.module, self.shape)
        self._tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self._pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        if self._pp_size > 1:
            self.module.config.variable_seq_lengths = True  # stages exchange the shape of each micro-batch
        self.version = 0  # counts every change of the weights in use
        self.stored_reference = Reference(self.module, self.whole_weights)
        self.reset_optimizer()

    # --- the module and its parameters -----------------------------------------------------------------------------

    @property
    def module(self) -> Any:
        """Megatron's GPTModel without its wrappers."""
        return self.model.get_model_module_list()[0]

    @property
    def mcore_optimizer(self) -> Any:
        return self.optimizer.mcore_optimizer

    def _leaf_optimizers(self) -> list[Any]:
        return getattr(self.mcore_optimizer, "chained_optimizers", None) or [self.mcore_optimizer]

    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    # --- forward ---------------------------------------------------------------------------------------------------

    def _logprobs_of(self, micro: _Micro, hidden_BTH: Tensor, temperature: float, with_entropy: bool) -> tuple:
        """Return (logp_BT, entropy_BT or None) of the response tokens; other positions are 0.

        Args:
            hidden_BTH: the model's last hidden states; for a packed micro-batch [1, N, H].  Under sequence parallelism
                the second dimension is this tensor rank's share of T or N.
        """
        batch, packed = micro
        if self.module.config.sequence_parallel:
            hidden_BTH = gather_from_sequence_parallel_region(hidden_BTH.transpose(0, 1)).transpose(0, 1)
        else:
            hidden_BTH = copy_to_tensor_model_parallel_region(hidden_BTH)
        predicts = batch.mask_BT[:, 1:]
        hidden_NH = hidden_BTH[:, :-1][predicts] if packed is None else hidden_BTH[0].index_select(0, packed.predicts_P)
        weight_VH = (
            self.module.shared_embedding_or_output_weight() if self.shape.tied else self.module.output_layer.weight
        )
        logp_N, entropy_N = chunked_logprobs(
            hidden_NH.to(weight_VH.dtype),  # exact: Megatron widens what a 16-bit model computes to float32
            weight_VH,
            batch.tokens_BT[:, 1:][predicts],
            temperature,
            vocab_size=self.shape.vocab,
            vocab_start=parallel_state.get_tensor_model_parallel_rank() * weight_VH.shape[0],
            group=parallel_state.get_tensor_model_parallel_group() if self._tp_size > 1 else None,
            chunk=self._chunk[0],
            block=self._chunk[1],
            with_entropy=with_entropy,
            float32_head=self._float32_head,
        )

        def place(value_N: Tensor) -> Tensor:
            zeros_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float32, device=value_N.device)
            return zeros_BT.masked_scatter(batch.mask_BT, value_N)

        return place(logp_N), place(entropy_N) if entropy_N is not None else None

    def _forward_step(self, finish: _Finish, micro_batches: Iterator[_Micro], net: Any) -> tuple:
        """Return the next micro-batch's hidden states, and a function that applies `finish` to them.

        Megatron's schedule calls this method once per micro-batch; only the last pipeline stage calls the function.
        """
        micro = batch, packed = next(micro_batches)
        if packed is None:
            position_T = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)
            hidden_BTH = net(batch.tokens_BT, position_T.expand_as(batch.tokens_BT), None, labels=None)
        else:
            hidden_BTH = net(packed.tokens_1N, packed.position_1N, None, labels=None, packed_seq_params=packed.params)

        def at_last_stage(output: Tensor, non_loss_data: bool = False) -> Any:
            return finish(micro, output)

        return hidden_BTH, at_last_stage

    def _parts(self, batch: Batch) -> list[tuple[Tensor, _Micro]]:
        """Split a batch into (row numbers, micro-batch on the device).  A collective.

        All data ranks get the same number of micro-batches, because they must make the same collective calls.
        """
        parts = batch.micro_batches(self.limits)
        most = self.data_ranks.most(len(parts))
        if len(parts) < most:
            parts = batch.micro_batches(self.limits, at_least=most)
        return [(rows, self._micro(micro)) for rows, micro in parts]

    def _micro(self, batch: Batch) -> _Micro:
        batch = batch.to(self._device())
        if not self.limits.packed:
            return batch, None
        return batch, PackedBatch.of(batch, self.limits.multiple_of, self._share_prompts)

    def _run(self, parts: Sequence[tuple[Tensor, _Micro]], finish: _Finish, forward_only: bool) -> list:
        """Run Megatron's schedule; return the result of `finish` per micro-batch, or [] except on the last stage.

        `self._shapes` gets the micro-batches' shapes.  Transformer Engine builds attention graphs for each of them.
        """
        first = parts[0][1][0].tokens_BT
        inputs = [batch.tokens_BT if packed is None else packed.tokens_1N for _, (batch, packed) in parts]
        self._shapes |= {(forward_only, tokens.shape) for tokens in inputs}
        set_sync_funcs(self.model, forward_only=forward_only)
        outputs: list = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, finish),
            data_iterator=iter([micro for _, micro in parts]),
            model=self.model.model,
            num_microbatches=len(parts),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            seq_length=first.shape[1],  # the first micro-batch's; pipeline stages exchange the true lengths
            micro_batch_size=first.shape[0],
        )
        self._drop_fp8_weights()
        return outputs

    def _drop_fp8_weights(self) -> None:
        """Drop Transformer Engine's FP8 copies of the weights; the first micro-batch of the next pass makes new ones.

        Transformer Engine before 2.2.0 would reuse the copies of a forward-only pass, which lack the transpose that a
        backward pass needs.
        """
        for module in self.module.modules():
            kept = getattr(module, "_fp8_workspaces", None)
            if kept:
                kept.clear()

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (logp_BT, entropy_BT) under the weights in use, float32 on the CPU."""
        logp_BT, entropy_BT = self._forward_only(batch, with_entropy=True)
        return logp_BT, entropy_BT

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Return logp_BT under the reference policy, float32 on the CPU."""
        with self.reference_weights():
            return self._forward_only(batch, with_entropy=False)[0]

    @torch.no_grad()
    def _forward_only(self, batch: Batch, with_entropy: bool) -> tuple[Tensor, ...]:
        set_eval(self.model)  # updates switch to train mode; `model.eval()` misses modules that NeMo hides from it

        def finish(micro: _Micro, hidden_BTH: Tensor) -> tuple[Tensor, ...]:
            logp_BT, entropy_BT = self._logprobs_of(micro, hidden_BTH, self.temperature, with_entropy)
            return (logp_BT,) if entropy_BT is None else (logp_BT, entropy_BT)

        parts = self._parts(batch)
        outputs = self._run(parts, finish, forward_only=True)
        found_KBT = torch.zeros(1 + with_entropy, *batch.mask_BT.shape)
        for (rows, _), values in zip(parts, outputs, strict=False):  # only the last stage has outputs
            for k, value_BT in enumerate(values):
                width = min(value_BT.shape[1], batch.mask_BT.shape[1])
                found_KBT[k, rows, :width] = value_BT[: len(rows), :width].to("cpu")
        if self._pp_size > 1:
            found_KBT = found_KBT.to(self._device())
            dist.broadcast(
                found_KBT,
                parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return found_KBT.cpu().unbind()

    # --- updates ---------------------------------------------------------------------------------------------------

    def gradients(
        self, batch: Batch, loss: LossFunction, denominator: float, temperature: float, with_entropy: bool = False
    ) -> dict:
        """Leave the gradient of `loss` over all data ranks' rows in the optimizer's buffers.

        Megatron's schedule divides a loss by the number of micro-batches, and data parallelism averages over its
        ranks.  This method undoes both divisions, so that only `denominator` divides.

        Args:
            denominator: number by which `loss` divides, such as the number of response tokens of all data ranks.

        Returns:
            The sums that `loss` reports, added over all data ranks, and four more numbers: `loss`, `positions`
            (number of token positions that went through the model), `padding` (number of these positions that
            belong to no sequence) and `max_shapes` (number of shapes of micro-batches so far, on the rank with most).
        """
        parts = self._parts(batch)
        scale = len(parts) * self.data_ranks.size

        def finish(micro: _Micro, hidden_BTH: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logp_BT, entropy_BT = self._logprobs_of(micro, hidden_BTH, temperature, with_entropy)
            value, sums = loss(logp_BT, entropy_BT, micro[0], denominator)
            return value * scale, {"loss": value.detach().clone(), **sums}  # clone: the schedule divides in place

        self.optimizer.zero_grad()
        prepare_for_training_step(self.model, zero_grad=False)
        outputs = self._run(parts, finish, forward_only=False)
        grad_reductions(self.model)
        sums = merge_sums([{k: float(v) for k, v in out.items()} for out in outputs])
        if self._pp_size > 1:
            box: list[Any] = [sums]
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(box, source, group=parallel_state.get_pipeline_model_parallel_group())
            sums = box[0]
        counts = _count_positions(parts) | {"max_shapes": float(len(self._shapes))}
        return self.data_ranks.reduce_sums(sums | counts)

    def update(
        self,
        batch: Batch,
        loss: LossFunction,
        denominator: float,
        temperature: float | None = None,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        """Make one optimizer step on the rows of all data ranks; return the sums of `gradients`, and `grad_norm`.

        Raises:
            NonFiniteUpdate: the loss, the gradient or a log-probability is not finite.  Weights and optimizer are then
                unchanged.
        """
        temperature = self.temperature if temperature is None else temperature
        sums = self.gradients(batch, loss, denominator, temperature, with_entropy)
        optimizer = self.mcore_optimizer
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        nonfinite = sums.get("nonfinite", 0.0)  # an infinite log-probability can hide behind the ratio's clamp
        if nonfinite or not math.isfinite(sums["loss"]) or not math.isfinite(grad_norm):
            raise NonFiniteUpdate(
                f"expected finite values; got loss {sums['loss']}, gradient norm {grad_norm}, {nonfinite:.0f}"
                " log-probabilities that are not finite"
            )
        for leaf in self._leaf_optimizers():
            if leaf.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(leaf.get_parameters(), leaf.config.clip_grad, grad_norm)
        optimizer.step_with_ready_grads()
        self.version += 1
        return {**sums, "grad_norm": grad_norm}

    def reset_optimizer(self) -> None:
        """Set Adam's moments and step count to zero; keep the master weights.  A hard reset calls this.

        The moments are created immediately, not at Adam's first step, so that a checkpoint written before that step has
        them and can be loaded.
        """
        for leaf in self._leaf_optimizers():
            adam = leaf.optimizer
            leaf.init_state_fn(adam, leaf.config)  # creates what is missing
            for state in adam.state.values():
                for moment in _MOMENTS:  # in place: awake engines leave no room for new ones
                    state[moment].zero_()
        self._set_step(0)

    def _set_step(self, step: int) -> None:
        for leaf in self._leaf_optimizers():
            adam = leaf.optimizer
            for group in adam.param_groups:
                if isinstance(adam, torch.optim.AdamW):  # counts per parameter; Transformer Engine's Adam per group
                    for p in group["params"]:
                        adam.state[p]["step"] = torch.tensor(float(step))
                else:
                    group["step"] = step

    def reload_masters(self) -> None:
        """Overwrite the float32 master weights with the weights in use; precision beyond bf16 is lost."""
        self.mcore_optimizer.reload_model_params()

    def set_learning_rate(self, lr: float) -> None:
        for group in self.mcore_optimizer.param_groups:
            group["lr"] = lr

    # --- weights ---------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of the weights in use, on every rank, in their dtype.  A collective.

        Tensors may be views of the weights: copy a tensor that is needed after the next update.
        """
        return self.whole_weights.gather({name: p.data for name, p in self.module.named_parameters()})

    def weights_sha256(self) -> str:
        """Return `sha256_of` the weights in use, which is the same at any parallel layout.  A collective."""
        return sha256_of(self.export_weights())

    # --- digests for the ledger ------------------------------------------------------------------------------------

    def digests(self, *objects: str) -> dict[str, dict[str, int]]:
        """Return digests (`algorithms.digests`) of objects of the last update by layer, over all ranks.  A collective.

        Args:
            objects: `weights`, those in use; or `gradient`, clipped, `moments`, Adam's, and `masters`, the float32
                weights.

        Returns:
            {layer: digest} of each object.
        """
        parts: dict[tuple[str, str], list[Tensor]] = {}
        offset = get_transformer_layer_offset(self.module.config)
        for kind, name, value in self._parts_of_state():
            if kind in objects:
                parts.setdefault((kind, _layer_of(name, offset)), []).append(value.detach().flatten())
        rank = dist.get_rank() if dist.is_initialized() else 0
        own = {
            (kind, layer): named(f"{layer} {rank}", digest(torch.cat(values) if len(values) > 1 else values[0]))
            for (kind, layer), values in parts.items()
        }
        every: list[Any] = [own] * (dist.get_world_size() if dist.is_initialized() else 1)
        if len(every) > 1:
            dist.all_gather_object(every, own)
        totals: dict[str, dict[str, int]] = {kind: {} for kind in objects}
        for (kind, layer), value in (item for part in every for item in part.items()):
            totals[kind][layer] = (totals[kind].get(layer, 0) + value) % (1 << 64)
        return totals

    def _parts_of_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (object, name of the parameter, this rank's values)."""
        if self.data_ranks.rank == 0:  # all data ranks have the same weights
            yield from (("weights", name, p) for name, p in self.module.named_parameters())
        names = {id(p): name for name, p in self.module.named_parameters()}
        for leaf in self._leaf_optimizers():
            buckets = (bucket for shards in leaf.gbuf_ranges for parts in shards.values() for bucket in parts)
            for p in (p for bucket in buckets for p in bucket["param_map"]):
                group, index = leaf.model_param_group_index_map[p]
                master, name = leaf.optimizer.param_groups[group]["params"][index], names[id(p)]
                if master.grad is not None:
                    yield "gradient", name, master.grad
                yield "masters", name, master
                yield from (("moments", name, leaf.optimizer.state[master][moment]) for moment in _MOMENTS)

    # --- reference policy ------------------------------------------------------------------------------------------

    def set_reference(self) -> None:
        """Copy the weights in use, in their dtype, to the reference policy; KL is exactly 0 right after."""
        self.stored_reference.set()

    def reference_weights(self) -> AbstractContextManager[None]:
        """Context manager in which the model computes with the reference policy's weights instead of its own.

        Do not write to the weights in this context: on a CPU they are the stored reference, not a copy.
        """
        return self.stored_reference.in_use()

    def reference_sha256(self) -> str:
        """Return `sha256_of` the reference policy, which is the same at any parallel layout.  A collective."""
        return self.stored_reference.sha256()


def _layer_of(name: str, offset: int) -> str:
    """Return `layer N` for a parameter of a layer, counted from 0 over all pipeline stages; its name for another."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    return f"layer {int(match[1]) + offset}" if match else name


def load_optimizer(actor: Actor, param_state: Mapping[int, Mapping[str, Tensor]], step: int) -> None:
    """Copy loaded moments and master weights into this rank's own, and set Adam's step count.

    Megatron's `load_state_dict` would first make new moments, for which awake engines leave no room.

    Args:
        param_state: as in Megatron's sharded state of a distributed optimizer; on any device.
    """
    (leaf,) = actor._leaf_optimizers()
    leaf.load_parameter_state_from_fs_model_space(param_state)
    actor._set_step(step)


def _count_positions(parts: Sequence[tuple[Tensor, _Micro]]) -> dict[str, float]:
    """Return the number of `positions` that go through the model; `padding` is how many belong to no sequence."""
    positions = padding = 0
    for rows, (batch, packed) in parts:
        if packed is None:
            size, unused = batch.tokens_BT.numel(), batch.tokens_BT.numel() - int(batch.length_B.sum())
        else:
            size, unused = packed.tokens_1N.numel(), packed.filling
        positions += size
        padding += unused if len(rows) else size
    return {"positions": float(positions), "padding": float(padding)}
