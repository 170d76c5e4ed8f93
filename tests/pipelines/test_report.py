import re

from pipelines.report import Report, readable_bytes, readable_count


def test_the_page_is_self_contained_and_shows_every_figure(walked) -> None:
    page = (walked.out / "report.html").read_text()
    assert not re.search(r'(src|href)="(https?:)?//', page)
    report = Report.read(walked.out)
    for stage in report.stages:
        assert f"<td>{stage.name}</td>" in page
        assert stage.artifact.sha256 in page
        assert f"{stage.measurements.speedup:.2f}×" in page
        for verdict in stage.verdicts:
            assert verdict.rule.replace("<", "&lt;").replace(">", "&gt;") in page
    assert "✓ Passed" in page


def test_what_the_user_wrote_is_escaped(walked) -> None:
    report = Report.read(walked.out)
    nasty = report.model_copy(update={"status": "failed", "error": "<script>alert(1)</script>"})
    page = nasty.html()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_figures_for_people() -> None:
    assert [readable_bytes(n) for n in (12, 45_600, 4_336_000)] == ["12 B", "46 kB", "4.34 MB"]
    assert [readable_count(n) for n in (None, 7, 1_084_010)] == ["–", "7", "1.08 M"]
