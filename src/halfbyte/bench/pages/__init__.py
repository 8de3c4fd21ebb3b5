"""Reports as web pages, each in one file that loads nothing.

markup.py    HTML and SVG elements, which escape their text; page.py: the page around them, style.css and script.js in it
charts.py    lines and points on axes, bars
linear.py    `halfbyte bench`; step.py: `halfbyte bench --model`; quality.py: `halfbyte eval`
"""
