#!/usr/bin/env python3
"""tokens.py ALL TOP PER_LINE: what a reader takes in, counted per file: words, numbers and operators of the .cu and .h
files, without comments. A string is one token. Comments, blank lines and line breaks are free. Exit 1 where the tokens
of all files, those of the top folder's, or the top's tokens per line of code exceed the limits."""
import glob
import re
import sys

STRING = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
TOKEN = re.compile(STRING + r'|[A-Za-z_]\w*|\d[\w.\']*|<<<|>>>|<<=|>>=|->\*|\.\.\.|::|->|\+\+|--|[-+*/%&|^=!<>]=|&&|\|\||'
                   r'<<|>>|\S')
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|' + STRING, re.S)


def count(text):
    """Tokens and lines of code of a source text."""
    code = COMMENT_OR_STRING.sub(lambda m: '' if m[0].startswith('/') else m[0], text)
    return len(TOKEN.findall(code)), sum(1 for line in code.split('\n') if line.strip())


def main(most, most_top, most_per_line):
    rows = {}
    for path in sorted(glob.glob('*.cu') + glob.glob('*.h') + glob.glob('lib/*') + glob.glob('fast/*')):
        with open(path, encoding='utf-8') as file:
            rows[path] = count(file.read())
    for path, (tokens, lines) in rows.items():
        print(f'{path:24} {tokens:7} tokens {lines:6} lines of code {tokens / lines:5.1f} tokens per line')
    total = sum(tokens for tokens, _ in rows.values())
    top = [row for path, row in rows.items() if '/' not in path]
    top_tokens, top_lines = (sum(column) for column in zip(*top))
    print(f'all {total} of {most:.0f} tokens, the top {top_tokens} of {most_top:.0f}, '
          f'{top_tokens / top_lines:.2f} of {most_per_line} per line of code')
    return total > most or top_tokens > most_top or top_tokens / top_lines > most_per_line


if __name__ == '__main__':
    assert count('a += "b c"; // d\n\n/* e */ f(1.5);\n') == (9, 2)
    sys.exit(main(*map(float, sys.argv[1:])))
