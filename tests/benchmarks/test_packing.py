from benchmarks.packing import main


def test_it_prints_both_tables(capsys):
    main(["rows=3000", "capacity=1024"])
    head, rule, ours, *_, step, _, one, eight, _, many = capsys.readouterr().out.splitlines()
    assert head == "| 3,000 rows into rows of 1024 | seconds | packed rows | fill |"
    assert rule == "|---|---|---|---|"
    name, seconds, packed, fill = ours.strip("| ").split(" | ")
    assert name == "Burnish, with row numbers"
    assert 0 < float(seconds) < 10
    assert 99 < float(fill.rstrip("%")) <= 100
    assert int(packed.replace(",", "")) > 3000 * 200 / 1024
    assert step == "| a step of 3,000 rows | ms | micro-batches a rank | waiting |"
    assert one.startswith("| 1 ranks | ")
    assert one.endswith(f" | {packed.replace(',', '')} | 0.0% |")
    assert float(eight.strip("| ").split(" | ")[3].rstrip("%")) < 5
    assert many.strip("| ").split(" | ")[2] == "1"
