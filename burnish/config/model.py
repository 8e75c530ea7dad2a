"""The keys below ``model``: which network, and how it computes."""

from typing import Annotated

from pydantic import BeforeValidator

from burnish.config.choices import Attention, Dtype, ModelPart
from burnish.config.section import Section
from burnish.config.values import Flag, Number, Text, Texts, Whole, Words, none_or, one_of, several, within, word_of


class LoraConfig(Section):
    """Low-rank adapters on a frozen base."""

    rank: Annotated[Whole, within(">= 0")] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[Number, within("> 0")] = 16
    """Adapters are scaled by alpha / rank."""
    dropout: Annotated[Number, within(">= 0", "< 1")] = 0.0
    """Dropout before each adapter."""
    target_modules: Texts = ("all-linear",)
    """Names of the modules that get adapters; `all-linear` is every linear layer but the head."""
    exclude_modules: Texts = ()
    """Names of modules that get none."""


class ModelConfig(Section):
    """The network and its tokenizer."""

    path: Text
    """Hub id, local folder, or s3:// or gs:// folder of the model and its tokenizer."""
    dtype: Annotated[Dtype | None, BeforeValidator(none_or(word_of(Dtype)))] = None
    """Format of the computation, none is bfloat16 on a GPU and float32 on a CPU; master weights and optimizer state are float32."""
    attention: Annotated[Attention, one_of(Attention)] = Attention.AUTO
    """How attention is computed; auto picks the fastest that isolates packed rows on this device."""
    trust_remote_code: Flag = False
    """Whether Python code that comes with the model may run."""
    lora: LoraConfig = LoraConfig()
    freeze: Annotated[
        tuple[ModelPart, ...],
        BeforeValidator(several(word_of(ModelPart))),
        Words("list of vision, projector, language"),
    ] = ()
    """Parts of a vision-language model whose weights stay as they are."""
    router_aux_loss_coef: Annotated[Number, within(">= 0")] = 0.0
    """Weight of the balancing loss of mixture-of-experts models; above 0 it is computed per micro-batch."""
