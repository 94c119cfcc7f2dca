#include "examples/char_gpt/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <sstream>

namespace char_gpt {
namespace {

constexpr double kWidth = 760, kHeight = 420, kLeft = 62, kRight = 24, kTop = 54, kBottom = 52;

std::string number(double value, int digits) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

// 1, 2 or 5 times a power of ten, so that about `n` steps fill the range.
double nice_step(double range, int n) {
  const double rough = std::max(range, 1e-9) / n;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

// Mean over a thirtieth of the curve around each value; fewer towards the ends, so that they stay where they
// are.
std::vector<double> smoothed(const std::vector<double>& values) {
  std::vector<double> sums{0};
  for (const double value : values) sums.push_back(sums.back() + value);
  std::vector<double> result;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t reach = std::min({values.size() / 60, i, values.size() - 1 - i});
    result.push_back((sums[i + reach + 1] - sums[i - reach]) / static_cast<double>(2 * reach + 1));
  }
  return result;
}

// From values to places in the picture.
struct Frame {
  double n, low, high;
  double x(double step) const { return kLeft + (kWidth - kLeft - kRight) * step / n; }
  double y(double value) const { return kTop + (kHeight - kTop - kBottom) * (high - value) / (high - low); }
};

void draw_line(std::ostream& out, const Frame& frame, const std::vector<double>& values, const char* style) {
  out << "<polyline fill=\"none\" " << style << " points=\"";
  for (std::size_t i = 0; i < values.size(); ++i) {
    out << number(frame.x(static_cast<double>(i + 1)), 1) << "," << number(frame.y(values[i]), 1) << " ";
  }
  out << "\"/>\n";
}

void draw_text(std::ostream& out, double x, double y, const char* style, const std::string& text) {
  out << "<text x=\"" << number(x, 1) << "\" y=\"" << number(y, 1) << "\" " << style << ">" << text
      << "</text>\n";
}

void draw_level(std::ostream& out, double y, const char* style) {
  out << "<line x1=\"" << kLeft << "\" x2=\"" << kWidth - kRight << "\" y1=\"" << number(y, 1) << "\" y2=\""
      << number(y, 1) << "\" " << style << "/>\n";
}

void draw_axes(std::ostream& out, const Frame& frame, const Chart& chart) {
  const double y_step = nice_step(frame.high - frame.low, 5);
  for (double value = std::ceil(frame.low / y_step) * y_step; value <= frame.high + 1e-9; value += y_step) {
    draw_level(out, frame.y(value), "stroke=\"#e3e6ea\"");
    draw_text(out, kLeft - 10, frame.y(value) + 4, "text-anchor=\"end\"", number(value, y_step < 1 ? 1 : 0));
  }
  const double x_step = std::max(1.0, nice_step(frame.n, 6));
  for (double step = 0; step <= frame.n + 1e-9; step += x_step) {
    draw_text(out, frame.x(step), kHeight - kBottom + 20, "text-anchor=\"middle\"", number(step, 0));
  }
  draw_level(out, frame.y(frame.low), "stroke=\"#9aa3ad\"");
  draw_text(out, kWidth / 2, kHeight - 12, "text-anchor=\"middle\"", chart.x_label);
  draw_text(out, kLeft - 44, kTop - 14, "", chart.y_label);
  draw_text(out, kWidth / 2, 26, "text-anchor=\"middle\" font-size=\"16\" fill=\"#1c2733\"", chart.title);
}

}  // namespace

std::string svg(const Chart& chart) {
  const auto [least, most] = std::minmax_element(chart.values.begin(), chart.values.end());
  const double step = nice_step(std::max(*most, chart.reference) - *least, 5);
  const Frame frame{static_cast<double>(chart.values.size()), std::floor(*least / step) * step,
                    std::ceil(std::max(*most, chart.reference) / step) * step};
  std::ostringstream out;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << kWidth << "\" height=\"" << kHeight
      << "\" viewBox=\"0 0 " << kWidth << " " << kHeight
      << "\" font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#5b6672\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n";
  draw_axes(out, frame, chart);
  if (!chart.reference_label.empty()) {
    draw_level(out, frame.y(chart.reference), "stroke=\"#d08a3c\" stroke-dasharray=\"5 4\"");
    draw_text(out, kWidth - kRight, frame.y(chart.reference) + 16, "text-anchor=\"end\" fill=\"#b06d22\"",
              chart.reference_label);
  }
  const auto smooth = smoothed(chart.values);
  draw_line(out, frame, chart.values, "stroke=\"#9cc0e8\" stroke-width=\"1\"");
  draw_line(out, frame, smooth, "stroke=\"#1f6fc4\" stroke-width=\"2.4\" stroke-linejoin=\"round\"");
  draw_text(out, kWidth - kRight, frame.y(chart.result) - 18,
            "text-anchor=\"end\" fill=\"#1f6fc4\" font-weight=\"bold\"", number(chart.result, 2));
  out << "</svg>\n";
  return out.str();
}

std::string text_plot(const std::vector<double>& values, int columns, int rows) {
  constexpr std::array<const char*, 9> kEighths{" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  if (values.empty()) return "";
  const auto smooth = smoothed(values);
  const auto [least, most] = std::minmax_element(smooth.begin(), smooth.end());
  const double low = std::floor(*least * 2) / 2, high = std::ceil(*most * 2 + 1e-9) / 2;
  std::ostringstream out;
  for (int row = rows - 1; row >= 0; --row) {
    const double level = low + (high - low) * (row + 1) / rows;
    out << (row == rows - 1 || row == rows / 2 - 1 ? number(level, 2) : "    ") << " ┤";
    for (int column = 0; column < columns; ++column) {
      const auto i = smooth.size() * static_cast<std::size_t>(column) / static_cast<std::size_t>(columns);
      const double eighths = (smooth[i] - low) / (high - low) * rows * 8 - row * 8;
      out << kEighths[static_cast<std::size_t>(std::clamp(std::lround(eighths), 0L, 8L))];
    }
    out << "\n";
  }
  out << number(low, 2) << " └ step 1";
  const std::string last = std::to_string(values.size());
  out << std::string(static_cast<std::size_t>(std::max(1, columns - 7 - static_cast<int>(last.size()))), ' ')
      << last << "\n";
  return out.str();
}

}  // namespace char_gpt
