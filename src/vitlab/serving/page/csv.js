// The table as CSV: RFC 4180, with the mark by which Excel knows UTF-8.

const FORMULA = /^[=+\-@\t\r]/; // spreadsheets would run what begins with one of these

const cell = (value) => {
  if (typeof value === "number") return String(value);
  const text = FORMULA.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

export const toCsv = (rows) => `\uFEFF${rows.map((row) => row.map((value) => cell(value ?? "")).join(",")).join("\r\n")}\r\n`;
