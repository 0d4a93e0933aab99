"""Texts and the trials made of them: the corpus, its tokens, needles, haystacks, windows."""
