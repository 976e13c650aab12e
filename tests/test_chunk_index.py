"""The chunk index of a run: processes append to one file, and read what the others have appended."""

import itertools

from conftest import corpus_of, make_documents, write_parquet
from torch.utils.data import DataLoader

from roberta_recipe.data import chunks, stream
from roberta_recipe.data.chunks import TextReader
from roberta_recipe.data.corpus import Source
from roberta_recipe.record import INDEX_NAME


def test_counts_are_those_of_chunks_that_data_workers_have_packed(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2_000)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    write_parquet(tmp_path / "text.parquet", make_documents(40, seed=0))
    corpus = corpus_of("corpus", [Source("text", files=str(tmp_path / "text.parquet"))])
    found = []
    for workers, damaged in ((0, False), (2, False), (2, True)):
        settings = {"input_format": "full_sentences", "max_seq_length": 64, "seed": 0}
        folder = tmp_path / f"{workers}{damaged}"
        folder.mkdir()
        reader = TextReader(corpus, tokenizer, **settings, index_folder=folder)
        loader = DataLoader(stream.TrainBlocks(reader, batch_size=4), 4, num_workers=workers, collate_fn=len)
        assert sum(itertools.islice(loader, 10)) == 40
        if damaged:
            content = bytearray((folder / INDEX_NAME).read_bytes())
            content[40] ^= 1
            (folder / INDEX_NAME).write_bytes(content)
        found.append(stream.consumed(reader, 40)[0])
    assert found[0] == found[1] == found[2] and found[0]["text"]["blocks"] >= 40, found
