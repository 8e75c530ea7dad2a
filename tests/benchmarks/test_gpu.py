"""The script for a GPU, on a CPU with a shape of two narrow layers."""

from benchmarks import gpu

NARROW = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}


def test_it_prints_a_table_for_each_shape(monkeypatch, capsys):
    monkeypatch.setitem(gpu.SHAPES, "0.5B", gpu.SHAPES["0.5B"] | NARROW | {"num_attention_heads": 2})
    monkeypatch.setattr(gpu, "LENGTH", 256)
    gpu.main(["shapes=0.5B", "steps=1"])
    said = capsys.readouterr().out
    assert said.startswith("\n0.5B\n\n| | tokens/s")
    assert "| Burnish |" in said


def test_the_shapes_have_the_sizes_they_are_named_by():
    def parameters(shape):
        width, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
        attention = width * (2 * heads + 2 * shape["num_key_value_heads"] * shape["head_dim"])
        layer = attention + 3 * width * shape["intermediate_size"]
        head = shape["vocab_size"] * width * (1 if shape["tie_word_embeddings"] else 2)
        return shape["num_hidden_layers"] * layer + head

    sizes = {name: round(parameters(shape) / 1e9, 1) for name, shape in gpu.SHAPES.items()}
    assert sizes == {"0.5B": 0.5, "1.5B": 1.5, "7B": 7.6}
