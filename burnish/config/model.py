"""The keys below ``model``: which network, and how it computes."""

from typing import Literal

from pydantic import Field

from burnish.config.choices import Dtype, ModelPart
from burnish.config.section import Section


class LoraConfig(Section):
    """Low-rank adapters on a frozen base."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(default=16, gt=0)
    """Adapters are scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before each adapter."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the modules that get adapters; `all-linear` is every linear layer but the head."""
    exclude_modules: tuple[str, ...] = ()
    """Names of modules that get none."""


class ModelConfig(Section):
    """The network and its tokenizer."""

    path: str
    """Hub id, local folder, or s3:// or gs:// folder of the model and its tokenizer."""
    dtype: Dtype | None = None
    """Format of the computation, none is bfloat16 on a GPU and float32 on a CPU; master weights and optimizer state are float32."""
    attention: Literal["auto", "flash", "flex", "sdpa"] = "auto"
    """How attention is computed; auto picks the fastest that isolates packed rows on this device."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run."""
    lora: LoraConfig = LoraConfig()
    freeze: tuple[ModelPart, ...] = ()
    """Parts of a vision-language model whose weights stay as they are."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the balancing loss of mixture-of-experts models; above 0 it is computed per micro-batch."""
