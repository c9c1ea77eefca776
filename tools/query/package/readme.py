"""The text that lies in every package: what each file is, and how to check it without CoServe."""

README = """\
Inspection results of circuit boards, exported by CoServe
=========================================================

Is the package whole?
    sha256sum -c SHA256SUMS                  no file was changed or lost
    coserve export --verify FOLDER           the same, and nothing was added
    sha256sum SHA256SUMS                     the package's fingerprint: whoever made it has seen the same
Checksums find accidents. Against somebody who changes files and checksums together, keep the fingerprint elsewhere.

manifest.json           of which line, when, by which version of CoServe, what was chosen, rows, what is missing
rows/TABLE.csv          for a spreadsheet: text that begins with = + - @ has an apostrophe in front; empty is null
rows/TABLE.jsonl        the same rows, exactly as the database has them, one JSON object a line
rows/TABLE.parquet      the same with types, where the exporting PC had the extra `export`
pictures.csv            every image: its file, or why there is none
pictures/BOARD/         images as the camera sent them; their sha256 is image_sha256 in rows/inspections
                        (.pgm and .ppm have a header before the bytes that were sent)
rules/VERSION.yaml      rules that were in force; rules_version is the beginning of the text's sha256
experts/catalog.yaml    how each version of an expert was used (labels, sizes, sha256 of its weights)
experts/*.safetensors   the weights, if the package was made --with-weights

Tables
    boards              one attempt at one board: type, serial, lot, station, verdict
    inspections         one image: designator, component, the daemon's own verdict, defect, reason, times
    stages              each expert's answer: version, label, confidence, device, batch, times
    detections          boxes that detectors saw, in pixels of the image
    reviews             decisions of people, none is ever changed; the newest counts
    final_verdicts      verdict and defect after the reviews, and who decided
    generations         texts that a language model wrote about these boards
    rules_versions, expert_versions     what the versions in the other tables mean

All rows are one state of the database. Times are UTC, durations milliseconds.
"""
