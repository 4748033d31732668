// The page /docs: Swagger UI with the OpenAPI document of this service.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => root.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();

SwaggerUIBundle({
  url: root.dataset.openapi,
  dom_id: "#docs",
  presets: [SwaggerUIBundle.presets.apis],
  // The address of an operation is part of the URL, so that it can be sent to a colleague.
  deepLinking: true,
  displayRequestDuration: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  filter: true,
  // The role that an operation needs is an extension of OpenAPI: x-role.
  showExtensions: true,
  tryItOutEnabled: true,
  // No other host checks the document, and a token is forgotten when the page is closed.
  validatorUrl: null,
  persistAuthorization: false,
});
