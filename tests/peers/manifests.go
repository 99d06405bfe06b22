// Reads manifests as Kubernetes does: documents are split as k8s.io/apimachinery splits them, and decoded by sigs.k8s.io/yaml. The input is
// a series of texts, each behind a line with its length. The answer to a text is a line: a JSON list of its documents, each with its value and,
// of Secrets and ConfigMaps, with the decoded values, or with an error.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

type values struct {
	Kind       string            `json:"kind"`
	Data       json.RawMessage   `json:"data"`
	BinaryData map[string][]byte `json:"binaryData"`
	StringData map[string]string `json:"stringData"`
}

type document struct {
	Value   json.RawMessage   `json:"value,omitempty"`
	Error   string            `json:"error,omitempty"`
	Content map[string][]byte `json:"content,omitempty"`
	Invalid string            `json:"invalid,omitempty"`
}

func split(text []byte) [][]byte {
	var documents [][]byte
	var current bytes.Buffer
	for _, line := range bytes.SplitAfter(text, []byte("\n")) {
		if bytes.HasPrefix(line, []byte("---")) && len(strings.TrimSpace(string(line[3:]))) == 0 && current.Len() > 0 {
			documents = append(documents, append([]byte(nil), current.Bytes()...))
			current.Reset()
			continue
		}
		current.Write(line)
	}
	return append(documents, current.Bytes())
}

func content(value []byte, result *document) {
	var object values
	if json.Unmarshal(value, &object) != nil {
		return
	}
	var err error
	result.Content = object.BinaryData
	switch object.Kind {
	case "Secret":
		if len(object.Data) > 0 {
			err = json.Unmarshal(object.Data, &result.Content)
		}
		for key, text := range object.StringData {
			if result.Content == nil {
				result.Content = map[string][]byte{}
			}
			result.Content[key] = []byte(text)
		}
	case "ConfigMap":
		var texts map[string]string
		if len(object.Data) > 0 {
			err = json.Unmarshal(object.Data, &texts)
		}
		for key, text := range texts {
			if result.Content == nil {
				result.Content = map[string][]byte{}
			}
			result.Content[key] = []byte(text)
		}
	}
	if err != nil {
		result.Content, result.Invalid = nil, err.Error()
	}
}

func main() {
	input := bufio.NewReader(os.Stdin)
	for {
		line, err := input.ReadString('\n')
		if err == io.EOF {
			return
		}
		length, _ := strconv.Atoi(strings.TrimSpace(line))
		text := make([]byte, length)
		io.ReadFull(input, text)
		results := []document{}
		for _, part := range split(text) {
			value, err := yaml.YAMLToJSON(part)
			if err != nil {
				results = append(results, document{Error: err.Error()})
			} else if string(value) != "null" {
				result := document{Value: value}
				content(value, &result)
				results = append(results, result)
			}
		}
		answer, err := json.Marshal(results)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(string(answer))
	}
}
