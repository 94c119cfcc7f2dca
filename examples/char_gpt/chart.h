// A curve as a picture, and as a few lines of text.
#pragma once

#include <string>
#include <vector>

namespace char_gpt {

struct Chart {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<double> values;  // at x = 1, 2, ...
  double result = 0;           // written at the end of the curve
  // A level to compare with, and what it is.
  double reference = 0;
  std::string reference_label;
};

// A stand-alone SVG document: the values as they are, and smoothed on top.
std::string svg(const Chart& chart);

// `rows` lines of block characters under one another, the range at the left.
std::string text_plot(const std::vector<double>& values, int columns = 64, int rows = 8);

}  // namespace char_gpt
