"""The result of `compress verify` as a file: HTML, Markdown or JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from compress.common.printable import markdown_text
from pipelines.reporting.html_page import render_page

if TYPE_CHECKING:
    from serve.verify import Proof


def render_proof(proof: Proof, name: str, ending: str) -> str:
    """Render a proof of an artifact as `.html`, as `.md`, or with another ending as JSON."""
    if ending == ".html":
        return render_page("proof.html.jinja", proof=proof, name=name, verdict=_verdict(proof))
    if ending != ".md":
        return json.dumps(proof.model_dump(mode="json"), indent=1) + "\n"
    about = [f"kind: {proof.kind}", f"SHA-256 of the file: `{proof.sha256}`"]
    about += [f"digest of the artifact: `{proof.digest}`"] if proof.digest else []
    about.append(f"answered by: {proof.served_by or 'nothing was started'}")
    parts = [f"# {markdown_text(name)}", f"**{_verdict(proof)}.**", _listed(about)]
    parts += ["## Proven", _listed(proof.proven)]
    if proof.unproven:
        parts += ["## Not proven", _listed(proof.unproven)]
    if proof.replays:
        rows = [
            f"| {markdown_text(r.what)} | {r.samples} | {r.largest_difference:.3g} |"
            for r in proof.replays
        ]
        table = ["| answered again | samples | largest difference |", "|---|---:|---:|", *rows]
        parts += ["## Answers", "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def _verdict(proof: Proof) -> str:
    left = len(proof.unproven)
    if left:
        what = "one thing" if left == 1 else f"{left} things"
        return f"✓ Nothing contradicts it; {what} could not be shown"
    return "✓ It answers as recorded" if proof.served_by else "✓ As it was sealed; not started"


def _listed(lines: list[str] | tuple[str, ...]) -> str:
    return "\n".join(f"- {markdown_text(line)}" for line in lines)
